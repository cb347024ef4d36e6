"""MoFedSAM (Qu et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import NonNegative, PositiveFraction
from fedflat.core.part import Backward, Part
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.direction import (
    MIXTURE,
    ONE_MODEL,
    last_direction,
    remember_direction,
    require_known_steps,
    warn_of_growth,
)
from fedflat.parts.sam import SAM


@dataclass(frozen=True)
class MoFedSAM(Part):
    """Mix SAM's local gradient with the direction in which the whole federation moved in the last round.

    K is the mean number of local steps.
    The server keeps m (1), zero at first; sends 2 down, 1 up; two gradients per step.

    It is the sum of FedCM and SAM, `fedcm(alpha=β)+sam(rho=ρ)`, under one name.

    Args:
        beta: β, the weight of the fresh gradient; 1 is FedSAM with uniform weights.
        rho: ρ, the radius; 0 is FedCM.
    """

    formula: ClassVar[str] = (
        "g ← β ∇L(w_k + ρ g/‖g‖) + (1 − β) m\nserver: w ← w + η_g mean_S Δ_i,  m ← −mean_S Δ_i / (K η_l)"
    )
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = 10  # mixes after the corrections of other parts
    uniform: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (MIXTURE,)
    alone_in: ClassVar[Mapping[str, str]] = ONE_MODEL
    beta: PositiveFraction = 0.1
    rho: NonNegative = 0.1

    def check(self, setup: SetupView) -> None:
        require_known_steps(setup, self)
        warn_of_growth(setup, self, self.beta)

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"m": last_direction(server, self)}

    def gradient(self, local: Local, backward: Backward) -> None:
        SAM(self.rho).gradient(local, backward)

    def correct_gradient(self, local: Local) -> None:
        if self.beta < 1:
            local.grad.mul_(self.beta).add_(local.received(self)["m"], alpha=1 - self.beta)

    def end_round(self, server: Server) -> None:
        remember_direction(server, self)
