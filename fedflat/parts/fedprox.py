"""FedProx (Li et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.method import Local, Part


@dataclass(frozen=True)
class FedProx(Part):
    """Pull every local step back to the model received, so that clients do not drift far.

    mu: μ, strength of the pull; 0 is FedAvg.
    Keeps nothing; sends 1 model down, 1 up. Differs from the paper in that no client returns early.
    """

    formula: ClassVar[str] = "g ← g + μ (w_k − w),  the gradient of (μ/2) ‖w_k − w‖²"
    mu: float = 0.01

    def __post_init__(self) -> None:
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")

    def begin(self, local: Local) -> None:
        """Tell normalised averaging how strong the pull is."""
        local.pull += self.mu

    def correct(self, local: Local) -> None:
        """Add the pull."""
        local.grad.add_(local.theta - local.origin, alpha=self.mu)
