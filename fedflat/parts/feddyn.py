"""FedDyn (Acar et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import add_pull, begin_pull, check_split, remember_drift, step_with_drift


@dataclass(frozen=True)
class FedDyn(Part):
    """Regularise each client so that its stationary points become those of the global loss.

    The client keeps H_i (1), the server H̄ (1); sends 1 down, 1 up. The paper's ĝ_i is −α_i H_i, its h is −α H̄.
    Differs from the paper in dividing α by the relative size ω_i of a client, as its code does.

    Args:
        alpha: α, the strength of the pull; 0 is *not* FedAvg, since the server still extrapolates by H̄.
        clip_split: Leave the term α_i w_k to the weight decay, which is not clipped, as published code does.
    """

    formula: ClassVar[str] = (
        "g ← g + α_i (w_k − w + H_i),  afterwards H_i ← H_i + Δ_i,  α_i = α/ω_i\n"
        "server: H̄ ← H̄ + (1/N) Σ_S Δ_i,  w ← mean_S y_i + H̄"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean of the local models plus the mean drift"
    alpha: NonNegative = 0.01
    clip_split: bool = False

    def check(self, setup: SetupView) -> None:
        check_split(setup, self, self.clip_split)

    def begin(self, local: Local) -> None:
        begin_pull(local, self, self.alpha, self.clip_split)

    def correct_gradient(self, local: Local) -> None:
        add_pull(local, self, self.clip_split)

    def end(self, local: Local) -> None:
        remember_drift(local, self)

    def step(self, server: Server, delta: Tensor) -> None:
        step_with_drift(server, self, delta)
