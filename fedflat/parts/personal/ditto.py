"""Ditto (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.method import Fit, Local, Part, State


@dataclass(frozen=True)
class Ditto(Part):
    """Beside the common model every client trains its own, tied to the common one by a proximal term.

    w is the model received this round. The common model is trained as without Ditto.

    lam: λ; 0 trains alone. epochs: passes over the data for v, `local_epochs` when None.
    Client keeps v (1); sends 1 down, 1 up. Both trajectories see the same minibatches.
    Differs from the authors' code in weighting clients by their samples, as FedAvg does; theirs is weighting="uniform".
    """

    formula: ClassVar[str] = "v ← v − η_l (∇F_B(v) + λ (v − w))"
    everywhere: ClassVar[bool] = True  # its correction is for its own trajectory
    lam: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        self.require(self.lam >= 0, f"lam must not be negative, got {self.lam}")
        self.require(self.epochs is None or self.epochs >= 0, f"epochs must not be negative, got {self.epochs}")

    def train(self, local: Local, fit: Fit) -> None:
        """The common model, then the client's own."""
        state, received = local.state(self), local.model.buffers.clone()
        fit()
        with local.model.loaded(state.get("theta", local.origin), state.get("buffers", received)):
            fit(epochs=self.epochs, branch=self.name)
            state.update(theta=local.theta.clone(), buffers=local.model.buffers.clone())

    def correct(self, local: Local) -> None:
        """Tie the client's own model to the one received."""
        if local.branch == self.name:
            local.grad.add_(local.theta - local.origin, alpha=self.lam)

    def personal(self, state: State, theta: Tensor) -> State | None:
        """v."""
        return state or None
