"""APFL (Deng et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.method import Evaluate, Local, Part, State


@dataclass(frozen=True)
class APFL(Part):
    """Every client evaluates a mixture v̄ = α v + (1 − α) w of its own weights and the common ones, and learns α.

    alpha: α at first. learn: whether α is learned. Client keeps v (1) and α; sends 1 down, 1 up; two gradients a step.
    Mixes weights, not outputs as the authors' code does.
    """

    formula: ClassVar[str] = (
        "w ← w − η_l ∇F_B(w),  v ← v − η_l α ∇F_B(v̄),  v̄ = α v + (1 − α) w\n"
        "once a round, at its first step, α ← clip(α − η_l ⟨∇F_B(v̄), v − w⟩, 0, 1)"
    )
    alpha: float = 0.5
    learn: bool = True

    def __post_init__(self) -> None:
        self.require(0 <= self.alpha <= 1, f"alpha must lie in [0, 1], got {self.alpha}")

    def begin(self, local: Local) -> None:
        """v and α start where they were left, at first at the model received."""
        state = local.state(self)
        alpha = state.get("alpha", torch.tensor(self.alpha, dtype=torch.float64)).item()
        own = state.get("theta", local.origin).clone()
        local.scratch(self).update(own=own, alpha=alpha, velocity=local.fresh_velocity(), first=True)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """A step of v and perhaps α; then the gradient of w."""
        if local.branch != "global":
            evaluate()
            return
        scratch = local.scratch(self)
        own, alpha = scratch["own"], scratch["alpha"]
        difference = own - local.theta
        with local.displaced(by=alpha * difference):
            evaluate()
        slope = torch.dot(local.grad, difference).item()
        local.descend(own, local.grad.clone().mul_(alpha), scratch["velocity"])
        if self.learn and scratch["first"]:
            scratch["alpha"] = min(1.0, max(0.0, alpha - local.lr * slope))
        scratch["first"] = False
        evaluate()

    def end(self, local: Local) -> None:
        """Keep v and α."""
        scratch = local.scratch(self)
        local.state(self).update(theta=scratch["own"], alpha=torch.tensor(scratch["alpha"], dtype=torch.float64))

    def personal(self, state: State, theta: Tensor) -> State | None:
        """The mixture with the weights the client would receive."""
        if not state:
            return None
        return {"theta": torch.lerp(theta, state["theta"], state["alpha"].item())}
