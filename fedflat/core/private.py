"""The coordinates of the model that each client keeps: they are never sent or averaged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedflat.core.flat import FlatModel, Span
from fedflat.core.tensors import State
from fedflat.errors import InputError


class Private:
    """The private coordinates of a model; false if there are none.

    Args:
        model: The model.
        names: Parameters and buffers, as in `state_dict`.
        splits: Whether the server has no complete model without them.

    Attributes:
        theta, buffers, counters: Positions in the model's three vectors.
        shared: Mask of the other weights.
    """

    KEY = "private"  # the name in a client's states

    def __init__(self, model: FlatModel, names: Iterable[str], splits: bool = False) -> None:
        self.names, self.splits = frozenset(names), splits
        known = {span.name for span in (*model.spans, *model.buffer_spans, *model.counter_spans)}
        for name in sorted(self.names - known):
            raise InputError(f"{name!r} cannot stay with the clients: the model has no such parameter or buffer")
        device = model.theta.device
        self.theta = self._positions(model.spans).to(device)
        self.buffers = self._positions(model.buffer_spans).to(device)
        self.counters = self._positions(model.counter_spans).to(device)
        self.shared = torch.ones(model.size, dtype=torch.bool, device=device)
        self.shared[self.theta] = False

    def _positions(self, spans: list[Span]) -> Tensor:
        ranges = [torch.arange(span.start, span.stop) for span in spans if span.name in self.names]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])

    def __bool__(self) -> bool:
        return bool(self.names)

    def load(self, model: FlatModel, state: State) -> None:
        """Put a client's own values into the model; a client without any starts from what it received."""
        if state:
            model.theta[..., self.theta] = state["theta"]
            model.buffers[..., self.buffers] = state["buffers"]
            model.counters[..., self.counters] = state["counters"]

    def taken(self, model: FlatModel) -> State:
        """Copies of the model's current private values."""
        return {
            "theta": model.theta[..., self.theta],
            "buffers": model.buffers[..., self.buffers],
            "counters": model.counters[..., self.counters],
        }

    def hide(self, vector: Tensor) -> None:
        """Set the private coordinates of a vector like `theta` to zero; other tensors stay as they are."""
        if vector.shape[-1:] == self.shared.shape:
            vector[..., self.theta] = 0

    def floats(self, tensor: Tensor) -> int:
        """How many numbers of a tensor are sent."""
        return tensor.numel() - (len(self.theta) if tensor.shape == self.shared.shape else 0)
