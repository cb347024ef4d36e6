"""FedSpeed (Sun et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Fraction, NonNegative
from fedflat.core.part import Backward, Part
from fedflat.core.rows import unit
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import add_pull, begin_pull, check_split, remember_drift, step_with_drift


@dataclass(frozen=True)
class FedSpeed(Part):
    """FedDyn's pull on a mixture of two gradients, the second taken a step uphill along the first.

    The client keeps H_i (1), the server H̄ (1); sends 1 down, 1 up; two gradients per step.
    Differs from the paper, as its code does, in the normalised step and the server's mean over all clients.

    Args:
        rho: ρ, the length of the step uphill.
        alpha: α' = 1/λ, the strength of the pull, with α_i = α'/ω_i.
        mix: a, the weight of the second gradient; at ρ = 0 or a = 0 the method is FedDyn.
        clip_split: As in FedDyn.
        server: "code" for the formula's server step; "paper" for w ← mean_S (y_i + H_i), which sends 1 more up.
        normalised: False takes the paper's raw step ρ g₁.
    """

    formula: ClassVar[str] = (
        "g₁ = ∇L(w_k),  g₂ = ∇L(w_k + ρ g₁/‖g₁‖),  g ← (1 − a) g₁ + a g₂ + α_i (w_k − w + H_i)\n"
        "afterwards H_i ← H_i + Δ_i;  server: w ← mean_S y_i + mean_all H_i"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean of the local models plus the mean drift"
    rho: NonNegative = 0.1
    alpha: NonNegative = 0.01
    mix: Fraction = 1.0
    clip_split: bool = False
    server: Literal["code", "paper"] = "code"
    normalised: bool = True

    def check(self, setup: SetupView) -> None:
        check_split(setup, self, self.clip_split)

    def begin(self, local: Local) -> None:
        begin_pull(local, self, self.alpha, self.clip_split)

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if self.rho == 0 or self.mix == 0:
            return
        here = local.grad.clone()
        with local.displaced(by=self.rho * (unit(here) if self.normalised else here)):
            backward()
        if self.mix < 1:
            torch.lerp(here, local.grad, self.mix, out=local.grad)

    def correct_gradient(self, local: Local) -> None:
        add_pull(local, self, self.clip_split)

    def end(self, local: Local) -> None:
        remember_drift(local, self)
        if self.server == "paper":
            local.send(self, h=local.state(self)["h"])

    def step(self, server: Server, delta: Tensor) -> None:
        if self.server == "code":
            step_with_drift(server, self, delta)
        else:
            server.theta = server.origin + delta + server.total(self)["h"] / server.participants
