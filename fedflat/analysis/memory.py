"""How much memory the graph of a loss and of its gradient takes, measured rather than guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def graph_bytes(loss: Callable[[int], Tensor], parameters: Sequence[Tensor], samples: int) -> int:
    """Bytes a sample of what automatic differentiation keeps for one Hessian product.

    loss: the loss of the first so many samples, of which there are `samples`. Two counts are tried, so that what does
    not grow cancels; with too few samples for that it counts as well.
    """
    few, more = 2, 4
    if samples < more:
        return _kept(loss, samples, parameters) // samples
    return max(_kept(loss, more, parameters) - _kept(loss, few, parameters), 0) // (more - few)


def _kept(loss: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor]) -> int:
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(count)
        # The first derivative is held until all is counted: memory given back could be counted again.
        held = value.requires_grad and torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    del held
    return sum(sizes.values())
