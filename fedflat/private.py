"""What stays with the client: the coordinates of the model that are its state and are never sent or averaged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedflat.errors import InputError
from fedflat.flat import FlatModel, Span
from fedflat.method import State


class Private:
    """The private coordinates of a model; false when there are none.

    theta, buffers, counters: their positions in the three vectors. shared: a mask of the other weights.

    names: of parameters and buffers, as in `state_dict`. splits: the server has no complete model without them.
    """

    KEY = "private"  # under which a client's states hold them

    def __init__(self, model: FlatModel, names: Iterable[str], splits: bool = False) -> None:
        self.names, self.splits = frozenset(names), splits
        known = {span.name for span in (*model.spans, *model.buffer_spans, *model.counter_spans)}
        for name in sorted(self.names - known):
            raise InputError(f"{name!r} cannot stay with the clients: the model has no such parameter or buffer")
        self.theta = self._positions(model.spans)
        self.buffers = self._positions(model.buffer_spans)
        self.counters = self._positions(model.counter_spans)
        self.shared = torch.ones(model.size, dtype=torch.bool)
        self.shared[self.theta] = False

    def _positions(self, spans: list[Span]) -> Tensor:
        ranges = [torch.arange(span.start, span.stop) for span in spans if span.name in self.names]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])

    def __bool__(self) -> bool:
        return bool(self.names)

    def load(self, model: FlatModel, state: State) -> None:
        """Put a client's own values into the model; a client that has none yet goes on from what it received."""
        if state:
            model.theta[self.theta] = state["theta"]
            model.buffers[self.buffers] = state["buffers"]
            model.counters[self.counters] = state["counters"]

    def taken(self, model: FlatModel) -> State:
        """Copies of the private values that the model has now."""
        return {
            "theta": model.theta[self.theta],
            "buffers": model.buffers[self.buffers],
            "counters": model.counters[self.counters],
        }

    def hide(self, vector: Tensor) -> None:
        """Set the private coordinates of a vector of the model's size to zero; leave other tensors alone."""
        if vector.shape == self.shared.shape:
            vector[self.theta] = 0

    def floats(self, tensor: Tensor) -> int:
        """How many numbers of a tensor travel."""
        return tensor.numel() - (len(self.theta) if tensor.shape == self.shared.shape else 0)
