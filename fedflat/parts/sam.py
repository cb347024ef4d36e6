"""Sharpness-aware gradients: SAM (Foret et al., 2021) and ASAM (Kwon et al., 2021), as FedSAM and FedASAM use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import NonNegative
from fedflat.core.part import Backward, Part
from fedflat.core.rows import TINY, norms, unit
from fedflat.core.views import Local


@dataclass(frozen=True)
class SAM(Part):
    """Descend along the gradient taken at the worst point nearby (FedSAM: Caldarola et al., 2022; Qu et al., 2022).

    Keeps nothing; sends 1 down, 1 up; two gradients per step, on the same batch.
    Corrections of other parts are added afterwards, at the unperturbed point.

    Args:
        rho: ρ, the radius; 0 is the plain gradient.
    """

    formula: ClassVar[str] = "ε = ρ g/‖g‖,  g ← ∇L(w_k + ε)"
    stacks: ClassVar[bool] = True
    rho: NonNegative = 0.05

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if self.rho > 0:
            with local.displaced(by=unit(local.grad).mul_(self.rho)):
                backward()


@dataclass(frozen=True)
class ASAM(Part):
    """SAM whose neighbourhood scales with each weight, so that rescaling the network does not change it.

    Keeps nothing; sends 1 down, 1 up; two gradients per step.
    Differs from the text of FedASAM, which adds η to every T; this follows its code, and ASAM's.

    Args:
        rho: ρ, the radius; 0 is the plain gradient.
        eta: η.
        all_tensors: Scale every tensor, not only those whose name contains "weight" (with eta=0 this is what some codes
            call adaptive SAM).
    """

    formula: ClassVar[str] = (
        "ε = ρ T² g / ‖T g‖,  g ← ∇L(w_k + ε)\nT = |w_k| + η for parameters called weight, 1 for the rest"
    )
    stacks: ClassVar[bool] = True
    rho: NonNegative = 0.5
    eta: NonNegative = 0.2
    all_tensors: bool = False

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if self.rho > 0:
            scale = self.scale(local)
            scaled = scale * local.grad
            with local.displaced(by=scale.mul_(scaled).mul_(self.rho / (norms(scaled) + TINY))):
                backward()

    def scale(self, local: Local) -> Tensor:
        """T at the current weights."""
        scratch = local.scratch(self)
        if "free" not in scratch:
            free = local.theta.new_zeros(local.model.size)  # 1 where T = 1, whatever the weight is
            for span in local.model.spans:
                if not (self.all_tensors or "weight" in span.name):
                    free[span.start : span.stop] = 1
            scratch["free"], scratch["scaled"], scratch["offset"] = free, 1 - free, free + self.eta * (1 - free)
        return local.theta.abs().mul_(scratch["scaled"]).add_(scratch["offset"])
