"""Ditto (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import Natural, NonNegative
from fedflat.core.part import Fit, Part
from fedflat.core.tensors import State
from fedflat.core.views import Local


@dataclass(frozen=True)
class Ditto(Part):
    """Besides the common model, every client trains its own, tied to the common one by a proximal term.

    w is the model received this round. The common model is trained as without Ditto; both see the same minibatches.
    The client keeps v (1); sends 1 down, 1 up.
    Differs from the authors' code in weighting clients by their samples, as FedAvg does; theirs is weighting="uniform".

    Args:
        lam: λ, the strength of the tie; 0 trains v alone.
        epochs: Passes over the data for v; None is `local_epochs`.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = "v ← v − η_l (∇F_B(v) + λ (v − w))"
    stacks: ClassVar[bool] = True
    everywhere: ClassVar[bool] = True  # it corrects its own trajectory
    lam: NonNegative = 1.0
    epochs: Natural | None = None

    def train(self, local: Local, fit: Fit) -> None:
        state, received = local.state(self), local.model.buffers.clone()
        fit()
        with local.model.loaded(state.get("theta", local.given), state.get("buffers", received)):
            fit(epochs=self.epochs, branch=self.name)
            state.update(theta=local.theta.clone(), buffers=local.model.buffers.clone())

    def correct_gradient(self, local: Local) -> None:
        if local.branch == self.name:
            local.grad.add_(local.theta - local.given, alpha=self.lam)

    def personal(self, state: State, theta: Tensor) -> State | None:
        return state or None
