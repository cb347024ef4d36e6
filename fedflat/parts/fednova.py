"""FedNova (Wang et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.part import Part
from fedflat.core.rows import each, one
from fedflat.core.sums import TreeSum
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts.drift import step_weights
from fedflat.parts.requirements import require_sgd


@dataclass(frozen=True)
class FedNova(Part):
    """Normalise each update by its number of steps, so that clients with many steps do not bias the objective.

    a_i counts the local steps, weighted as momentum and a proximal pull weight them (see `step_weights`); with a pull,
    τ = Σ_S p_i K_i as in the authors' code. Keeps nothing; sends 1 down, 1 up and two numbers, for a_i and τ.
    """

    formula: ClassVar[str] = "w ← w + η_g τ Σ_S p_i Δ_i / a_i,  τ = Σ_S p_i a_i,  p_i = n_i / Σ_S n_j"

    stacks: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True

    def check(self, setup: SetupView) -> None:
        require_sgd(self.name, setup, "the weight a_i of a client's steps")

    def end(self, local: Local) -> None:
        e = local.experiment

        def weight(steps: float, mu: float) -> float:
            return step_weights(int(steps), e.momentum, e.nesterov, shrink=local.lr * mu)

        weights = each(weight, local.steps, local.proximal) * local.mean_rate
        tau = each(lambda mu, w, steps: steps if mu else w, local.proximal, weights, local.weighted_steps)
        columns = [one(local.theta, 1.0, torch.float64) * number for number in (weights, tau)]
        local.send(self, weights=torch.cat(columns, dim=-1))

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        e, told = setup.experiment, update.sent.get(self.name, {}).get("weights", torch.zeros(2)).tolist()
        most = step_weights(update.steps, e.momentum, e.nesterov, shrink=0.0)
        low, high = 0.5 * bool(update.steps), max(most, float(update.steps)) * (1 + 1e-9)
        return None if all(low <= one <= high for one in told) else f"step weights {told}, not from {low:g} to {high:g}"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        total, tau, weight = TreeSum[Tensor](), 0.0, 0.0
        for update in updates:
            own, effective = update.sent[self.name]["weights"].tolist()
            total.add(update.delta * (update.weight / own if own else 0.0))
            tau, weight = tau + update.weight * effective, weight + update.weight
        return total.result() * (tau / weight**2)
