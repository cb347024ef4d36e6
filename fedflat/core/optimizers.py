"""The clients' optimisers: `Experiment(optimizer="adamw(beta2=0.99)")`.

An optimiser turns a gradient into a direction u, and the loop moves the weights by −lr · u. Clipping, masks and clients
that have finished are the loop's business, so an optimiser is a formula and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.fields import BelowOne, NonNegative, Positive, check_fields
from fedflat.core.tensors import State

SHARED = ("momentum", "nesterov", "weight_decay")
"""Fields of an optimiser that are fields of the experiment as well; None means the experiment's value."""


@dataclass(frozen=True)
class Optimizer:
    """A rule for the direction of a step. Vectors are the last dimension, as everywhere on the client.

    Attributes:
        name: The name in experiments.
        linear: Whether the update is −lr times a weighted sum of the gradients, with weights that do not depend on the
            gradients. Some methods divide updates by such weights.
        decoupled: Whether the weights decay by themselves (u ← u + weight_decay · w) instead of through the gradient.
    """

    name: ClassVar[str] = ""
    linear: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False
    weight_decay: NonNegative | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, f"optimizer {self.name}")

    def __str__(self) -> str:
        own = (f for f in fields(self) if f.name not in SHARED and getattr(self, f.name) != f.default)
        inner = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in own)
        return f"{self.name}({inner})" if inner else self.name

    def start(self, theta: Tensor) -> State:
        """The state with which a trajectory begins."""
        return {}

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """The direction u; changes `state` in place and may overwrite `grad`."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with the experiment's momentum: v ← momentum · v + g, u = v.

    Args:
        momentum, nesterov, weight_decay: Another way to write the experiment's fields of these names.
    """

    name: ClassVar[str] = "sgd"
    linear: ClassVar[bool] = True
    momentum: BelowOne | None = None
    nesterov: bool | None = None

    def start(self, theta: Tensor) -> State:
        """See `Optimizer`."""
        return {"velocity": torch.zeros_like(theta)} if self.momentum else {}

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """See `Optimizer`."""
        if not self.momentum:
            return grad
        velocity = state["velocity"].mul_(self.momentum).add_(grad)
        return grad.add_(velocity, alpha=self.momentum) if self.nesterov else velocity


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015): the mean gradient divided by its typical size; weight decay is added to the gradient.

    Args:
        beta1, beta2: β₁, β₂, how much of the old means of g and g² is kept.
        eps: ε, added to the typical size.
        weight_decay: Another way to write the experiment's field of this name.
    """

    name: ClassVar[str] = "adam"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: Positive = 1e-8

    def start(self, theta: Tensor) -> State:
        """See `Optimizer`."""
        steps = torch.zeros_like(theta[..., :1])
        return {"mean": torch.zeros_like(theta), "square": torch.zeros_like(theta), "steps": steps}

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """See `Optimizer`."""
        steps, mean, square = state["steps"].add_(1), state["mean"], state["square"]
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        size = torch.sqrt(square, out=grad).div_(_weight(self.beta2, steps).sqrt_()).add_(self.eps)
        return torch.div(mean, size, out=size).div_(_weight(self.beta1, steps))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): u = Adam's + weight_decay · w.

    Args:
        beta1, beta2, eps: As in Adam.
        weight_decay: Another way to write the experiment's field of this name.
    """

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop (Hinton, 2012): the gradient divided by the root of a running mean of its square.

    Args:
        alpha: α, how much of the old mean of g² is kept.
        eps: ε, added to the root.
        weight_decay: Another way to write the experiment's field of this name.
    """

    name: ClassVar[str] = "rmsprop"
    alpha: BelowOne = 0.99
    eps: Positive = 1e-8

    def start(self, theta: Tensor) -> State:
        """See `Optimizer`."""
        return {"square": torch.zeros_like(theta)}

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """See `Optimizer`."""
        square = state["square"].mul_(self.alpha).addcmul_(grad, grad, value=1 - self.alpha)
        return grad.div_(square.sqrt().add_(self.eps))


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011): the gradient divided by the root of the sum of its squares so far.

    Args:
        eps: ε, added to the root.
        weight_decay: Another way to write the experiment's field of this name.
    """

    name: ClassVar[str] = "adagrad"
    eps: Positive = 1e-10

    def start(self, theta: Tensor) -> State:
        """See `Optimizer`."""
        return {"square": torch.zeros_like(theta)}

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """See `Optimizer`."""
        square = state["square"].addcmul_(grad, grad)
        return grad.div_(square.sqrt().add_(self.eps))


def _weight(beta: float, steps: Tensor) -> Tensor:
    """1 − βᵗ, the sum of the weights in a running mean after t steps; exact to rounding also where βᵗ is nearly 1."""
    return torch.expm1(steps * math.log(beta)).neg_() if beta else torch.ones_like(steps)
