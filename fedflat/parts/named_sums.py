"""Famous names of sums of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedflat.core.fields import BelowOne, NonNegative
from fedflat.core.part import Part
from fedflat.parts.feddyn import FedDyn
from fedflat.parts.global_momentum import FedACG
from fedflat.parts.global_sam import FedLESAM
from fedflat.parts.sam import SAM
from fedflat.parts.scaffold import Scaffold


def fedgamma(rho: NonNegative = 0.01) -> tuple[Part, ...]:
    """SCAFFOLD with SAM's gradients, which seek flat minima of the global loss: FedGAMMA (Dai et al., 2023)."""
    return Scaffold(), SAM(rho)


def fednsam(gamma: BelowOne = 0.85, rho: NonNegative = 0.05) -> tuple[Part, ...]:
    """Nesterov momentum of the server with SAM's gradients: FedNSAM (Liu et al., 2026)."""
    return FedACG(lam=gamma, beta=0.0), SAM(rho)


def fedlesam_s(rho: NonNegative = 0.01, direction: Literal["own", "last"] = "own") -> tuple[Part, ...]:
    """FedLESAM on SCAFFOLD: FedLESAM-S (Fan et al., 2024)."""
    return Scaffold(), FedLESAM(rho, direction)


def fedlesam_d(
    rho: NonNegative = 0.01, alpha: NonNegative = 0.1, direction: Literal["own", "last"] = "own"
) -> tuple[Part, ...]:
    """FedLESAM on FedDyn: FedLESAM-D (Fan et al., 2024)."""
    return FedDyn(alpha), FedLESAM(rho, direction)


SUMS: dict[str, Callable[..., tuple[Part, ...]]] = {
    "fedgamma": fedgamma,
    "fednsam": fednsam,
    "fedlesam_s": fedlesam_s,
    "fedlesam_d": fedlesam_d,
}
"""Functions that make the parts of a sum, by name."""
