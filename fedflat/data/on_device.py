"""A federation whose batches are made on a device, from data that lie there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedflat.core.devices import kind_of, on
from fedflat.core.inputs import map_inputs
from fedflat.core.samples import Samples
from fedflat.data.federation import Federation
from fedflat.data.pooled import PooledClients
from fedflat.data.samples import TensorSamples


class OnDevice(Federation):
    """The same data, with batches on a device.

    Tensors are copied to the device as they are (images as bytes), each once, and batches are gathered there. What does
    not fit into the memory that data may take, and data sets that are not tensors, stay in the host's memory: batches
    are then gathered there and copied, several small ones at once.

    Args:
        federation: The data.
        device: Where batches go.
        share: The share of the device's memory that data may take.
    """

    def __init__(self, federation: Federation, device: torch.device, share: float = 1.0) -> None:
        self.__dict__.update(federation.__dict__)
        self._device = device
        self._kept = WeakIdKeyDictionary()  # a lazy sequence may make its tensors anew whenever it is asked
        memory = kind_of(device).memory(device)
        self._room = None if memory is None else int(share * memory[1])
        self.test = None if federation.test is None else self._placed(federation.test)
        self.tests = {name: self._placed(samples) for name, samples in federation.tests.items()}

    def samples(self, client: int) -> Samples:
        """See `Federation`."""
        return self._placed(super().samples(client))

    @property
    def pooled(self) -> PooledClients | None:
        """See `Federation`."""
        return self._pool

    def joint(self, clients: Sequence[int]) -> TensorSamples | None:
        """See `Federation`."""
        made = super().joint(clients)
        placed = None if made is None else self._placed(made)
        return placed if isinstance(placed, TensorSamples) else None

    def client_test(self, client: int) -> Samples | None:
        """See `Federation`."""
        samples = super().client_test(client)
        return None if samples is None else self._placed(samples)

    def _placed(self, samples: Samples) -> Samples:
        if isinstance(samples, TensorSamples) and self._fits(samples):
            return DeviceSamples(self._copy(samples.x), self._copy(samples.y), samples.indices)
        return CopiedBatches(samples, self._device)

    def _fits(self, samples: TensorSamples) -> bool:
        missing = sum(tensor.nbytes for tensor in (samples.x, samples.y) if tensor not in self._kept)
        if self._room is None or not missing:
            return True
        taken: int = sum(self._kept[tensor].nbytes for tensor in self._kept)
        return missing + taken <= self._room

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor not in self._kept:
            self._kept[tensor] = on(tensor, self._device)
        copy: Tensor = self._kept[tensor]
        return copy


class DeviceSamples(TensorSamples):
    """Samples in two tensors of a device; positions come from the host."""

    def _rows_of(self, indices: Tensor) -> Tensor:
        return on(super()._rows_of(indices), self.x.device)


class CopiedBatches:
    """Samples in the host's memory; every batch is copied to a device."""

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.base, self._device = samples, device

    def __len__(self) -> int:
        return len(self.base)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Raw inputs and targets at these positions."""
        x, y = self.base.batch(indices)
        return map_inputs(self._copy, x), on(y, self._device)

    def _copy(self, leaf: Any) -> Any:
        return on(leaf, self._device) if isinstance(leaf, Tensor) else leaf
