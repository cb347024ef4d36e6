"""AdaBest (Varno et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import BelowOne, NonNegative
from fedflat.core.part import Part
from fedflat.core.rows import Number, each, one
from fedflat.core.views import Local, Server


@dataclass(frozen=True)
class AdaBest(Part):
    """Correct each client by an estimate of its bias that fades while it is absent, and extrapolate the mean.

    In the first round h_i is zero and θ̄_last is the initial model.
    The client keeps h_i (1) and r_i, the server θ̄ (1); sends 1 down, 1 up.

    Args:
        beta: β, the factor of the extrapolation.
        mu: μ, on the scale of FedDyn's α; β = μ = 0 is FedAvg with uniform weights.
        mu_scaling: "paper" for μ, or "fedsim" for μ·B·E/n_i as that library scales it.
    """

    formula: ClassVar[str] = (
        "g ← g − h_i,  afterwards h_i ← h_i / (t − r_i) − μ Δ_i,  r_i ← t\n"
        "server: θ̄ = mean_S y_i,  w ← θ̄ + β (θ̄ − θ̄_last)"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the extrapolated mean of the local models"
    beta: BelowOne = 0.9
    mu: NonNegative = 0.02
    mu_scaling: Literal["paper", "fedsim"] = "paper"

    def correct_gradient(self, local: Local) -> None:
        bias = local.state(self).get("h")
        if bias is not None:
            local.grad.sub_(bias)

    def end(self, local: Local) -> None:
        state, now = local.state(self), float(local.round)
        fresh = (local.origin - local.theta) * self._strength(local)
        state["h"] = state["h"] / (now - state["last"]).to(fresh.dtype) + fresh if "h" in state else fresh
        state["last"] = one(local.theta, now, torch.float64)

    def _strength(self, local: Local) -> Number:
        if self.mu_scaling == "paper":
            return self.mu
        e = local.experiment

        def scaled(samples: float, steps: float) -> float:
            batch = min(e.batch_size or samples, samples)
            epochs = e.local_epochs if e.local_steps is None else steps * batch / samples
            return self.mu * batch * epochs / samples

        return each(scaled, local.samples, local.steps)

    def step(self, server: Server, delta: Tensor) -> None:
        state, mean = server.state(self), server.origin + delta
        server.theta = mean + self.beta * (mean - state.get("mean", server.origin))
        state["mean"] = mean
