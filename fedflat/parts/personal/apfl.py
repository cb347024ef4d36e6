"""APFL (Deng et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Fraction
from fedflat.core.part import Backward, Part
from fedflat.core.rows import dots
from fedflat.core.tensors import State
from fedflat.core.views import Local


@dataclass(frozen=True)
class APFL(Part):
    """Every client evaluates a mixture v̄ = α v + (1 − α) w of its own weights and the common ones, and learns α.

    Mixes weights as the paper does, or outputs as the authors' code does.
    The client keeps v (1) and α; sends 1 down, 1 up; two gradients per step.

    Args:
        alpha: The initial α.
        learn: Whether α is learned.
        mix: "weights", or "logits": F_B is then the loss of α z(v) + (1 − α) z(w), and 0.02 α is added to the gradient
            of α; both models are evaluated together.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "w ← w − η_l ∇F_B(w),  v ← v − η_l α ∇F_B(v̄),  v̄ = α v + (1 − α) w\n"
        "once a round, at its first step, α ← clip(α − η_l ⟨∇F_B(v̄), v − w⟩, 0, 1)"
    )
    global_gradient: ClassVar[bool] = True
    alpha: Fraction = 0.5
    learn: bool = True
    mix: Literal["weights", "logits"] = "weights"

    @property
    def stacks(self) -> bool:  # type: ignore[override]
        """Outputs are mixed client by client."""
        return self.mix == "weights"

    def begin(self, local: Local) -> None:
        state = local.state(self)
        alpha = state["alpha"].to(local.theta.dtype) if state else torch.full_like(local.theta[..., :1], self.alpha)
        own = state.get("theta", local.given).clone()
        local.scratch(self).update(own=own, alpha=alpha, optimizer=local.start_optimizer(), first=True)

    def gradient(self, local: Local, backward: Backward) -> None:
        scratch = local.scratch(self)
        own, alpha = scratch["own"], scratch["alpha"]
        slope = (self._of_weights if self.mix == "weights" else self._of_logits)(local, backward, own, alpha)
        local.descend(own, local.grad.clone(), scratch["optimizer"])
        if self.learn and scratch["first"]:
            scratch["alpha"] = (alpha - local.lr * slope).clamp(0, 1)
        scratch["first"] = False
        backward()

    def _of_weights(self, local: Local, backward: Backward, own: Tensor, alpha: Tensor) -> Tensor:
        """Leave v's gradient of F_B(v̄) in `local.grad`; returns that of α."""
        difference = own - local.theta
        with local.displaced(by=alpha * difference):
            backward()
        slope = dots(local.grad, difference)
        local.grad.mul_(alpha)
        return slope

    def _of_logits(self, local: Local, backward: Backward, own: Tensor, alpha: Tensor) -> Tensor:
        """The same for the loss of the mixed outputs, with the authors' penalty of α."""
        slopes: list[Tensor] = []
        with torch.no_grad(), local.model.loaded(local.theta.clone()):
            common = local.model(local.batch.x)

        def objective(output: Tensor) -> Tensor:
            mixed = alpha * output + (1 - alpha) * common
            probe = mixed.detach().requires_grad_()
            (towards,) = torch.autograd.grad(local.loss_of(probe), probe)
            slopes.append((towards * (output.detach() - common)).sum())
            return local.loss_of(mixed)

        with local.displaced(by=own - local.theta):
            backward(of=objective)
        return slopes[0] + 0.02 * alpha

    def end(self, local: Local) -> None:
        scratch = local.scratch(self)
        local.state(self).update(theta=scratch["own"], alpha=scratch["alpha"].double())

    def personal(self, state: State, theta: Tensor) -> State | None:
        if not state:
            return None
        alpha = state["alpha"].to(theta.dtype)
        if self.mix == "logits":
            return {"theta": state["theta"], "second": theta, "share": alpha}
        return {"theta": torch.lerp(theta, state["theta"], alpha)}
