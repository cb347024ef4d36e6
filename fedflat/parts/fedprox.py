"""FedProx (Li et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local


@dataclass(frozen=True)
class FedProx(Part):
    """Pull every local step back to the model received, so that clients do not drift far.

    Keeps nothing; sends 1 model down, 1 up. Differs from the paper in that no client returns early.

    Args:
        mu: μ, strength of the pull; 0 is FedAvg.
    """

    formula: ClassVar[str] = "g ← g + μ (w_k − w),  the gradient of (μ/2) ‖w_k − w‖²"
    stacks: ClassVar[bool] = True
    mu: NonNegative = 0.01

    def begin(self, local: Local) -> None:
        local.proximal += self.mu  # fednova weights the steps by it

    def correct_gradient(self, local: Local) -> None:
        local.grad.add_(local.theta - local.origin, alpha=self.mu)
