"""FedNova (Wang et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.method import Local, Part, Server, Update
from fedflat.parts.drift import step_weights
from fedflat.sums import TreeSum


@dataclass(frozen=True)
class FedNova(Part):
    """Normalise each update by how many steps are in it, so that busy clients do not bend the objective.

    a_i counts the local steps, weighted as momentum and a proximal pull weight them (see `step_weights`); with a pull
    τ = Σ_S p_i K_i as in the authors' code. Keeps nothing; sends 1 down, 1 up and two numbers, for a_i and τ.
    """

    formula: ClassVar[str] = "w ← w + η_g τ Σ_S p_i Δ_i / a_i,  τ = Σ_S p_i a_i,  p_i = n_i / Σ_S n_j"

    def end(self, local: Local) -> None:
        """Send a_i, and what it contributes to τ."""
        e = local.experiment
        weights = step_weights(local.steps, e.momentum, e.nesterov, shrink=local.lr * local.pull)
        tau = float(local.steps) if local.pull else weights
        local.send(self, weights=torch.tensor([weights, tau], dtype=torch.float64))

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Mean of the normalised updates, at the mean length."""
        total, tau, weight = TreeSum(), 0.0, 0.0
        for update in updates:
            own, effective = update.sent[self.name]["weights"].tolist()
            total.add(update.delta * (update.weight / own if own else 0.0))
            tau, weight = tau + update.weight * effective, weight + update.weight
        return total.result() * (tau / weight**2)
