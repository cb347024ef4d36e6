"""FedSpeed (Sun et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.flat import unit
from fedflat.method import Evaluate, Local, Part, Server
from fedflat.parts.drift import add_pull, begin_pull, check_split, remember_drift, step_with_drift

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class FedSpeed(Part):
    """FedDyn's pull with a gradient that looks ahead along itself.

    rho: ρ. alpha: α' = 1/λ, with α_i = α'/ω_i. mix: a; at ρ = 0 or a = 0 this is FedDyn. clip_split: as in FedDyn.
    server: "code" for this one, or "paper" for w ← mean_S (y_i + H_i), which sends one model more up.
    normalised: False for the paper's raw step ρ g₁.
    Client keeps H_i (1), server H̄ (1); sends 1 down, 1 up; two gradients a step.
    Differs from the paper, as its code does, in the normalised step and the server's mean over all clients.
    """

    formula: ClassVar[str] = (
        "g₁ = ∇L(w_k),  g₂ = ∇L(w_k + ρ g₁/‖g₁‖),  g ← (1 − a) g₁ + a g₂ + α_i (w_k − w + H_i)\n"
        "afterwards H_i ← H_i + Δ_i;  server: w ← mean_S y_i + mean_all H_i"
    )
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    own_step: ClassVar[str] = "the mean of the local models plus the mean drift"
    rho: float = 0.1
    alpha: float = 0.01
    mix: float = 1.0
    clip_split: bool = False
    server: str = "code"
    normalised: bool = True

    def __post_init__(self) -> None:
        self.require(self.rho >= 0, f"rho must not be negative, got {self.rho}")
        self.require(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")
        self.require(0 <= self.mix <= 1, f"mix must lie between 0 and 1, got {self.mix}")
        self.require(self.server in ("code", "paper"), f"server is 'code' or 'paper', not {self.server!r}")

    def check(self, task: Task) -> None:
        """Refuse published code's clipping where it would do something else."""
        check_split(task, self, self.clip_split)

    def begin(self, local: Local) -> None:
        """Set the strength of the pull."""
        begin_pull(local, self, self.alpha, self.clip_split)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """Look ahead, and mix."""
        evaluate()
        if self.rho == 0 or self.mix == 0:
            return
        here = local.grad.clone()
        with local.displaced(by=self.rho * (unit(here) if self.normalised else here)):
            evaluate()
        if self.mix < 1:
            torch.lerp(here, local.grad, self.mix, out=local.grad)

    def correct(self, local: Local) -> None:
        """Add the pull."""
        add_pull(local, self, self.clip_split)

    def end(self, local: Local) -> None:
        """Add this round's update to the client's drift."""
        remember_drift(local, self)
        if self.server == "paper":
            local.send(self, h=local.state(self)["h"])

    def step(self, server: Server, delta: Tensor) -> None:
        """Mean plus drift."""
        if self.server == "code":
            step_with_drift(server, self, delta)
        else:
            server.theta = server.origin + delta + server.total(self)["h"] / server.participants
