"""ReLU and max-pooling in the cheaper order: after the pool, the ReLU has fewer numbers to read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn
from torch.overrides import has_torch_function

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class PoolFirst(nn.Sequential):
    """A chain of layers in which a ReLU comes after the max-pooling that follows it.

    Output and gradients have the same bits in both orders: where the largest number of a window is positive, both pass
    it on, and otherwise both give 0 and pass no gradient. Where somebody watches one of the two layers (a hook, or a
    mode that sees functions, as MAN's does), the ReLU comes first.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last layer."""
        for layer in self._ordered(x):
            x = layer(x)
        return x

    def _ordered(self, x: Tensor) -> Iterator[nn.Module]:
        layers, place, seen = list(self), 0, has_torch_function((x,))
        while place < len(layers):
            both = layers[place : place + 2]
            later = not seen and _exchangeable(*both) and not any(getattr(m, hooks) for m in both for hooks in HOOKS)
            yield from reversed(both) if later else both[:1]
            place += 1 + later


def _exchangeable(first: nn.Module, second: nn.Module | None = None) -> bool:
    return type(first) is nn.ReLU and type(second) is nn.MaxPool2d


def pool_first(module: nn.Module) -> None:
    """Let all chains within the network, a module of its own, pool first where they can. Names stay as they are."""
    for chain in module.modules():
        if type(chain) is nn.Sequential and any(_exchangeable(*both) for both in pairwise(chain)):
            chain.__class__ = PoolFirst
