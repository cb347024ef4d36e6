"""What one client holds: something with a length that hands out batches by position."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedflat.errors import InputError

LOOK = 256  # how many samples of a map-style dataset are read where only a glance is wanted


@runtime_checkable
class Samples(Protocol):
    """Training or test data of one client."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Raw inputs and targets at these positions (an int64 tensor of values 0 … len−1)."""
        ...


class TensorSamples:
    """Samples in two tensors, or the subset `indices` of a pool that many clients share.

    The tensors are never copied: a batch is one gather from each of them. Images kept channels-last in memory
    come out so.
    """

    def __init__(self, x: Tensor, y: Tensor, indices: Tensor | None = None) -> None:
        if x.dim() == 0 or y.dim() == 0:
            raise InputError("x and y need a dimension that counts samples; train takes one entry a client")
        if len(x) != len(y):
            raise InputError(f"{len(x)} inputs but {len(y)} targets: one target a sample is needed")
        self.x, self.y, self.indices = x, y, indices
        # A gather of whole rows is a memory copy only along the memory's own order.
        self._swapped = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self._rows = x.permute(0, 2, 3, 1) if self._swapped else x

    def __len__(self) -> int:
        return len(self.x) if self.indices is None else len(self.indices)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these positions."""
        if self.indices is not None:
            indices = self.indices[indices]
        x = self._rows.index_select(0, indices)
        return x.permute(0, 3, 1, 2) if self._swapped else x, self.y.index_select(0, indices)

    @property
    def labels(self) -> Tensor:
        """All targets, in the order of the positions."""
        return self.y if self.indices is None else self.y[self.indices]


class DatasetSamples:
    """A map-style dataset of pairs `(x, y)`; batches are collated as PyTorch's `DataLoader` does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets at these positions."""
        rows = [self.dataset[i] for i in indices.tolist()]
        if not (isinstance(rows[0], (tuple, list)) and len(rows[0]) == 2):
            kind = type(rows[0]).__name__
            raise InputError(f"a sample must be a pair (x, y), not a {kind}: wrap the data set in one that gives pairs")
        x, y = default_collate(rows)
        return x, torch.as_tensor(y)


def as_samples(data: Any, where: str) -> Samples:
    """Wrap what a user gives: a pair of tensors or arrays, a map-style dataset, or `Samples` already.

    where: what to call it in an error ("client 3", "the test set").
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        try:
            x, y = (torch.as_tensor(part) for part in data)
            # Losses want class labels as int64, arrays often hold narrower ones.
            return TensorSamples(x, y if y.is_floating_point() else y.to(torch.int64))
        except (ValueError, TypeError) as error:  # such as strides that PyTorch cannot have
            raise InputError(f"{where}: {error}") from None
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, dict)):
        return DatasetSamples(data)
    remedy = "; give its .dataset" if hasattr(data, "dataset") else ""
    kind = type(data).__name__
    raise InputError(
        f"{where}: expected a pair (x, y) of tensors or a map-style dataset of such pairs, got {kind}{remedy}"
    )


def labels_of(samples: Samples, limit: int | None = None) -> Tensor:
    """Targets of the samples; where they are not in a tensor, of the first `limit` of them only."""
    if isinstance(samples, TensorSamples):
        return samples.labels
    count = len(samples) if limit is None else min(limit, len(samples))
    positions = [torch.arange(start, min(start + LOOK, count)) for start in range(0, count, LOOK)]
    return torch.cat([samples.batch(part)[1] for part in positions] or [torch.empty(0, dtype=torch.int64)])
