"""Sharpness-aware gradients: SAM (Foret et al., 2021) and ASAM (Kwon et al., 2021), as FedSAM and FedASAM use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.flat import unit
from fedflat.method import Evaluate, Local, Part


@dataclass(frozen=True)
class SAM(Part):
    """Descend along the gradient taken at the worst point nearby (FedSAM: Caldarola et al., 2022; Qu et al., 2022).

    rho: ρ, radius; 0 is the plain gradient. Keeps nothing; sends 1 down, 1 up; two gradients a step, on the same batch.
    Corrections of other parts are added afterwards, at the unperturbed point.
    """

    formula: ClassVar[str] = "ε = ρ g/‖g‖,  g ← ∇L(w_k + ε)"
    rho: float = 0.05

    def __post_init__(self) -> None:
        self.require(self.rho >= 0, f"rho must not be negative, got {self.rho}")

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """Ascend, evaluate, come back."""
        evaluate()
        if self.rho > 0:
            with local.displaced(by=self.rho * unit(local.grad)):
                evaluate()


@dataclass(frozen=True)
class ASAM(Part):
    """SAM whose neighbourhood scales with each weight, so that rescaling the network does not change it.

    rho: ρ, radius; 0 is the plain gradient. eta: η. all_tensors: scale every tensor, not only those whose name contains
    "weight" (with eta=0 this is what some codes call adaptive SAM). Keeps nothing; sends 1 down, 1 up; two gradients a
    step.
    Differs from the text of FedASAM, which adds η to every T; this is its code, and ASAM's own.
    """

    formula: ClassVar[str] = (
        "ε = ρ T² g / ‖T g‖,  g ← ∇L(w_k + ε)\nT = |w_k| + η for parameters called weight, 1 for the rest"
    )
    rho: float = 0.5
    eta: float = 0.2
    all_tensors: bool = False

    def __post_init__(self) -> None:
        self.require(self.rho >= 0, f"rho must not be negative, got {self.rho}")
        self.require(self.eta >= 0, f"eta must not be negative, got {self.eta}")

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """Ascend, evaluate, come back."""
        evaluate()
        if self.rho > 0:
            scale = self.scale(local)
            scaled = scale * local.grad
            with local.displaced(by=scale.mul_(scaled).mul_(self.rho / (scaled.norm().item() + 1e-16))):
                evaluate()

    def scale(self, local: Local) -> Tensor:
        """T at the current weights."""
        scratch = local.scratch(self)
        if "free" not in scratch:
            free = torch.zeros_like(local.theta)  # 1 where T = 1, whatever the weight is
            for span in local.model.spans:
                if not (self.all_tensors or "weight" in span.name):
                    free[span.start : span.stop] = 1
            scratch["free"], scratch["scaled"], scratch["offset"] = free, 1 - free, free + self.eta * (1 - free)
        return local.theta.abs().mul_(scratch["scaled"]).add_(scratch["offset"])
