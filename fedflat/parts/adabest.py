"""AdaBest (Varno et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.method import Local, Part, Server


@dataclass(frozen=True)
class AdaBest(Part):
    """Estimate each client's bias with a memory that fades while it is away, and extrapolate the mean.

    At first h_i is zero and θ̄_last the initial model.

    beta: β. mu: μ, on the scale of FedDyn's α; both 0 is FedAvg with uniform weights.
    mu_scaling: "paper", or "fedsim" for μ·B·E/n_i as that library scales it.
    Client keeps h_i (1) and r_i, server θ̄ (1); sends 1 down, 1 up.
    """

    formula: ClassVar[str] = (
        "g ← g − h_i,  afterwards h_i ← h_i / (t − r_i) − μ Δ_i,  r_i ← t\n"
        "server: θ̄ = mean_S y_i,  w ← θ̄ + β (θ̄ − θ̄_last)"
    )
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    own_step: ClassVar[str] = "the extrapolated mean of the local models"
    beta: float = 0.9
    mu: float = 0.02
    mu_scaling: str = "paper"

    def __post_init__(self) -> None:
        self.require(0 <= self.beta < 1, f"beta must be at least 0 and below 1, got {self.beta}")
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")
        self.require(
            self.mu_scaling in ("paper", "fedsim"), f"mu_scaling is 'paper' or 'fedsim', not {self.mu_scaling!r}"
        )

    def correct(self, local: Local) -> None:
        """Subtract the estimated bias."""
        bias = local.state(self).get("h")
        if bias is not None:
            local.grad.sub_(bias)

    def end(self, local: Local) -> None:
        """Fade the estimate and add this round's evidence."""
        state, now = local.state(self), float(local.round)
        fresh = (local.origin - local.theta) * self._strength(local)
        state["h"] = state["h"] / (now - state["last"].item()) + fresh if "h" in state else fresh
        state["last"] = torch.tensor([now], dtype=torch.float64)

    def _strength(self, local: Local) -> float:
        if self.mu_scaling == "paper":
            return self.mu
        e = local.experiment
        batch = min(e.batch_size or local.samples, local.samples)
        epochs = e.local_epochs if e.local_steps is None else local.steps * batch / local.samples
        return self.mu * batch * epochs / local.samples

    def step(self, server: Server, delta: Tensor) -> None:
        """Extrapolate the mean."""
        state, mean = server.state(self), server.origin + delta
        server.theta = mean + self.beta * (mean - state.get("mean", server.origin))
        state["mean"] = mean
