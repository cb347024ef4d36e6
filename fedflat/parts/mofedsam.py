"""MoFedSAM (Qu et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.method import Evaluate, Local, Part, Server
from fedflat.parts.sam import SAM

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class MoFedSAM(Part):
    """Mix SAM's local gradient with the direction in which the whole federation moved last.

    beta: β, weight of the fresh gradient; 1 is FedSAM with uniform weights. rho: ρ, radius; 0 is FedCM.
    Server keeps m (1), zero at first; sends 2 down, 1 up; two gradients a step. K is the mean number of local steps.
    """

    formula: ClassVar[str] = (
        "g ← β ∇L(w_k + ρ g/‖g‖) + (1 − β) m\nserver: w ← w + η_g mean_S Δ_i,  m ← −mean_S Δ_i / (K η_l)"
    )
    rank: ClassVar[int] = 10  # mixes what the other corrections have made
    uniform: ClassVar[bool] = True
    beta: float = 0.1
    rho: float = 0.1

    def __post_init__(self) -> None:
        self.require(0 <= self.beta <= 1, f"beta must lie between 0 and 1, got {self.beta}")
        self.require(self.rho >= 0, f"rho must not be negative, got {self.rho}")

    def check(self, task: Task) -> None:
        """Refuse a K that tells who has joined where nobody may know."""
        secret = any(part.discreet for part in task.method.parts) and task.experiment.local_steps is None
        self.require(not secret, "its K, the mean number of local steps, is not covered by dp: set local_steps")

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        """Send the direction of the last round."""
        return {"m": server.state(self).get("m", torch.zeros_like(server.theta))}

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """SAM's gradient."""
        SAM(self.rho).gradient(local, evaluate)

    def correct(self, local: Local) -> None:
        """Mix the two directions."""
        if self.beta < 1:
            local.grad.mul_(self.beta).add_(local.received(self)["m"], alpha=1 - self.beta)

    def conclude(self, server: Server) -> None:
        """Remember the direction of this round."""
        scale = (server.experiment.local_steps or server.steps) * server.lr
        if scale > 0:
            server.state(self)["m"] = server.delta / -scale
