"""What one client holds: something with a length that hands out batches by position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedflat.errors import InputError
from fedflat.words import shortened

Collate = Callable[[list[Any]], Any]
Columns = tuple[str | Sequence[str], str]
"""Names of the input column (or columns, which become one vector) and of the target."""
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
            raise InputError("x and y need a dimension that counts samples; train takes one entry per client")
        if len(x) != len(y):
            raise InputError(f"{len(x)} inputs but {len(y)} targets: one target per sample is needed")
        self.x, self.y, self.indices = x, y, indices
        # A gather of whole rows is a memory copy only along the memory's own order.
        self._swapped = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self._rows = x.permute(0, 2, 3, 1) if self._swapped else x
        self._length = len(x if indices is None else indices)
        self.width = x.numel() // max(1, len(x))  # numbers per sample
        self.kind = type(self), x.dtype, y.dtype, x.device

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these positions."""
        indices = self._rows_of(indices)
        x = self._rows.index_select(0, indices)
        return x.permute(0, 3, 1, 2) if self._swapped else x, self.y.index_select(0, indices)

    def _rows_of(self, indices: Tensor) -> Tensor:
        """Rows of the two tensors at these positions."""
        return indices if self.indices is None else self.indices[indices]

    @property
    def labels(self) -> Tensor:
        """All targets, in the order of the positions."""
        return self.y if self.indices is None else self.y[self.indices]


def together(samples: Sequence[Samples], most: int) -> TensorSamples | None:
    """The samples of several clients, one after the other.

    None where they are not all tensors of one kind, or where more than `most` numbers would have to be copied.
    """
    own = [s for s in samples if isinstance(s, TensorSamples)]
    if len(own) < len(samples) or len({s.kind for s in own}) > 1:
        return None
    first, pools = own[0], [s.indices for s in own if s.indices is not None]
    if pools:
        same = len(pools) == len(own) and all(s.x is first.x and s.y is first.y for s in own)
        return type(first)(first.x, first.y, torch.cat(pools)) if same else None
    if first.width * sum(s._length for s in own) > most:
        return None
    try:
        return type(first)(torch.cat([s.x for s in own]), torch.cat([s.y for s in own]))
    except RuntimeError:  # their shapes differ
        return None


class DatasetSamples:
    """A map-style dataset of pairs `(x, y)`.

    Args:
        dataset: The data.
        collate: Makes a pair of inputs and targets from a list of samples; by default as PyTorch's `DataLoader` does.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets at these positions."""
        rows = [self.dataset[i] for i in indices.tolist()]
        if self._collate is not None:
            return _pair(self._collate(rows))
        if not (isinstance(rows[0], (tuple, list)) and len(rows[0]) == 2):
            kind = type(rows[0]).__name__
            raise InputError(f"a sample must be a pair (x, y), not a {kind}: wrap the data set in one that gives pairs")
        try:
            x, y = default_collate(rows)
            return x, torch.as_tensor(y)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"samples cannot be put into one batch: {error}; give Federation(collate=…), a function that makes "
                "a batch (x, y) from a list of samples"
            ) from error


def _pair(made: Any) -> tuple[Any, Tensor]:
    if not (isinstance(made, (tuple, list)) and len(made) == 2):
        raise InputError(f"collate= must return a pair of inputs and targets, not a {type(made).__name__}")
    return made[0], torch.as_tensor(made[1])


class Ahead:
    """Samples that are read by a second thread while the model works on the batch before.

    The order of reading stays the same. But what the data draw at random then depends on time: use it for data that
    draw nothing.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._reader = ThreadPoolExecutor(1)
        self._next: tuple[Tensor, Future[tuple[Any, Tensor]]] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def labels(self) -> Tensor | None:
        """All targets, where they are known without reading."""
        return getattr(self._samples, "labels", None)

    def targets_at(self, indices: Tensor) -> Tensor:
        """Targets at these positions."""
        return targets_at(self._samples, indices)

    def ahead(self, indices: Tensor) -> None:
        """Begin to read the batch at these positions."""
        self._next = indices, self._reader.submit(self._samples.batch, indices)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets at these positions."""
        begun, self._next = self._next, None
        if begun is not None and begun[0].equal(indices):
            return begun[1].result()
        return self._samples.batch(indices)


class Chosen:
    """Some of the samples, by their positions."""

    def __init__(self, samples: Samples, positions: Tensor) -> None:
        self._samples, self._positions = samples, positions
        self.at_once: int = getattr(samples, "at_once", len(positions))

    def __len__(self) -> int:
        return len(self._positions)

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets at these positions."""
        return self._samples.batch(self._positions[indices])


def is_table(data: Any) -> bool:
    """Whether data have named columns."""
    return _is_frame(data) or (hasattr(data, "column_names") and hasattr(data, "features"))


def _is_frame(data: Any) -> bool:
    return hasattr(data, "iloc") and hasattr(data, "columns")


class TableSamples:
    """Rows of a table. Pictures become uint8 tensors (channels, height, width), lists and arrays tensors."""

    def __init__(self, table: Any, columns: Columns | None, where: str) -> None:
        known = [str(name) for name in (table.columns if _is_frame(table) else table.column_names)]
        if columns is None:
            raise InputError(
                f"{where} is a table: say which columns are input and target, Federation(columns=(…, …)); it has "
                f"{', '.join(known)}"
            )
        try:
            inputs, self._target = columns
        except (TypeError, ValueError):
            raise InputError(f'columns= takes a pair such as ("image", "label"), not {columns!r}') from None
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._together = not isinstance(inputs, str)
        for name in (*self._inputs, self._target):
            if name not in known:
                raise InputError(f"{where} has no column {name!r}; it has {', '.join(known)}")
        self._table = table
        self._rows: Tensor | None = None
        self.labels: Tensor | None = None  # all targets, where somebody has read them

    def __len__(self) -> int:
        return len(self._table) if self._rows is None else len(self._rows)

    def __getitem__(self, indices: Tensor) -> TableSamples:
        """The rows at these positions; none is read."""
        some = copy.copy(self)
        some._rows = indices if self._rows is None else self._rows[indices]
        some.labels = None if self.labels is None else self.labels[indices]
        return some

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these positions."""
        positions = (indices if self._rows is None else self._rows[indices]).tolist()
        rows = self._table.iloc[positions] if _is_frame(self._table) else self._table[positions]
        parts = [_tensor(rows[name], name) for name in self._inputs]
        if self._together:
            parts = [torch.stack([part.float() for part in parts], dim=1)]
        target = _tensor(rows[self._target], self._target)
        return parts[0], target if target.is_floating_point() else target.long()


def _tensor(values: Any, name: str) -> Tensor:
    """A column as one tensor. Raises `InputError` for text and other things that are not numbers."""
    array = np.asarray(values) if hasattr(values, "to_numpy") else np.stack([np.asarray(value) for value in values])
    if array.dtype == np.float64:  # what pandas and lists make of any number
        array = array.astype(np.float32)
    if array.dtype == np.uint8 and array.ndim in (3, 4):  # pictures: channels last, or none
        array = array[:, None] if array.ndim == 3 else np.moveaxis(array, 3, 1)
    if array.dtype.kind not in "fiub":
        found = shortened(array.flat[0])
        raise InputError(f"column {name!r} holds {found}, and a model needs numbers: convert it first")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # pandas hands out arrays that are read-only


def as_samples(data: Any, where: str, columns: Columns | None = None, collate: Collate | None = None) -> Samples:
    """Wrap what a user gives: a pair of tensors or arrays, a table, a map-style dataset, or `Samples` already.

    where: what to call it in an error ("client 3", "the test set"). columns: of a table. collate: of a dataset.
    """
    if _hands_out_batches(type(data)):  # type: ignore[arg-type]
        return data  # type: ignore[no-any-return]
    if is_table(data):
        return TableSamples(data, columns, where)
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        try:
            x, y = (torch.as_tensor(part) for part in data)
            # Losses want class labels as int64, arrays often hold narrower ones.
            return TensorSamples(x, y if y.is_floating_point() else y.to(torch.int64))
        except (ValueError, TypeError) as error:  # such as strides that PyTorch cannot have
            raise InputError(f"{where}: {error}") from None
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, dict)):
        return DatasetSamples(data, collate)
    remedy = "; give its .dataset" if hasattr(data, "dataset") else ""
    kind = type(data).__name__
    raise InputError(
        f"{where}: expected a pair (x, y) of tensors or a map-style dataset of such pairs, got {kind}{remedy}"
    )


@cache
def _hands_out_batches(kind: type) -> bool:
    """Whether objects of a class are `Samples`; asked for every client of every round, answered once per class."""
    table = hasattr(kind, "column_names")  # Hugging Face's datasets have a method `batch` of another meaning
    return not table and all(callable(getattr(kind, name, None)) for name in ("__len__", "batch"))


def targets_at(samples: Samples, indices: Tensor) -> Tensor:
    """Targets at these positions; inputs are not read where samples can do without."""
    alone = getattr(samples, "targets_at", None)
    return alone(indices) if alone else samples.batch(indices)[1]


def labels_of(samples: Samples, limit: int | None = None) -> Tensor:
    """Targets of the samples; where they are not in a tensor, of the first `limit` of them only."""
    known = getattr(samples, "labels", None)
    if isinstance(known, Tensor):
        return known
    count = len(samples) if limit is None else min(limit, len(samples))
    positions = [torch.arange(start, min(start + LOOK, count)) for start in range(0, count, LOOK)]
    return torch.cat([targets_at(samples, part) for part in positions] or [torch.empty(0, dtype=torch.int64)])
