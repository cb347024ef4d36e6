"""The data of an analysis as batches in memory. It is read twice to check that its order is fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.devices import CPU, on
from fedflat.core.inputs import first_leaf, map_inputs
from fedflat.core.samples import Samples
from fedflat.data.samples import DatasetSamples, TensorSamples, as_samples
from fedflat.errors import InputError

Batch: TypeAlias = tuple[Any, Tensor]
READ = 256  # samples of a map-style dataset that are collated at a time
LANES = 8  # fixed number of partial sums, so that a sum does not depend on the number of workers
EXPECTED = "a pair (x, y) of tensors, an iterable of such batches, or a map-style dataset of pairs"


def read(data: Any) -> list[Batch]:
    """The user's data as a list of batches; a pair of tensors is one batch and is not copied.

    Iterables and datasets are read twice; if the two readings differ, an error is raised.
    """
    readable = isinstance(data, (Iterable, Samples)) or hasattr(data, "__getitem__")
    if isinstance(data, (Tensor, dict, str)) or not readable:
        raise InputError(f"the data has no labels that could be used: give {EXPECTED}, not {type(data).__name__}")
    batches = [_pair(data)] if _is_pair(data) else _read_twice(data)
    if sum(len(y) for _, y in batches) == 0:
        raise InputError("there is no data: at least one sample is needed")
    return batches


def _is_pair(data: Any) -> bool:
    """Whether the data is one batch (x, y), where x is a tensor or a structure of tensors."""
    if not (isinstance(data, (tuple, list)) and len(data) == 2 and hasattr(data[1], "shape")):
        return False
    inputs = first_leaf(data[0])
    return hasattr(inputs, "shape") and len(inputs.shape) > 0 and len(data[1].shape) > 0


def _pair(data: Any) -> Batch:
    if not hasattr(data[0], "shape"):  # a structure of tensors, as in training
        return next(_batches([data]))
    samples = as_samples(data, "the data")
    return (samples.x, samples.y) if isinstance(samples, TensorSamples) else samples.batch(torch.arange(len(samples)))


def _read_twice(data: Any) -> list[Batch]:
    first = list(_batches(data))
    if isinstance(data, (list, tuple, Iterator)):  # these keep their batches, or can be read only once
        return first
    second = _batches(data)
    for number, (x, y) in enumerate(first, start=1):
        again = next(second, None)
        if again is None or not (_equal(x, again[0]) and _equal(y, again[1])):
            part = "its end" if again is None else "its labels" if _equal(x, again[0]) else "its inputs"
            raise InputError(
                f"batch {number} of the data differs when read again ({part}): turn shuffling and augmentation off"
            )
    if next(second, None) is not None:
        raise InputError("the data has more batches when read again: it must be the same at every reading")
    return first


def _batches(data: Any) -> Iterator[Batch]:
    """Batches of an iterable, or of the samples of a map-style dataset."""
    if isinstance(data, Samples) or _is_dataset(data):
        yield from _collated(data if isinstance(data, Samples) else DatasetSamples(data))
        return
    for batch in data:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise InputError(f"the data has no labels: a batch is {type(batch).__name__}, not a pair; give {EXPECTED}")
        x, y = batch[0], torch.as_tensor(batch[1])
        if y.dim() == 0 or (isinstance(x, Tensor) and len(x) != len(y)):
            raise InputError(f"a batch needs one label per sample; give {EXPECTED}")
        yield x, y if y.is_floating_point() else y.to(torch.int64)


def _is_dataset(data: Any) -> bool:
    """Whether the data has an index and a length and its elements are samples; in a list, labels must be scalars."""
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or len(data) == 0:
        return False
    first = data[0]
    if not (isinstance(first, (tuple, list)) and len(first) == 2):
        return False
    return not isinstance(data, (list, tuple)) or torch.as_tensor(first[1]).dim() == 0


def _collated(samples: Samples) -> Iterator[Batch]:
    for start in range(0, len(samples), READ):
        yield samples.batch(torch.arange(start, min(start + READ, len(samples))))


def _equal(a: Any, b: Any) -> bool:
    """Bitwise equality, also inside dictionaries and sequences."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    same: bool = a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return same


def take(x: Any, index: Any) -> Any:
    """The samples at `index` (a slice or positions) of an input, a tensor or a structure of tensors."""
    return map_inputs(lambda tensor: tensor[index], x)


def subset(batches: list[Batch], count: int, seed: int) -> list[Batch]:
    """A fixed random subset of `count` samples in their original order; all samples if there are no more."""
    total = sum(len(y) for _, y in batches)
    if count >= total:
        return batches
    if count < 1:
        raise InputError(f"max_samples must be at least 1, got {count}")
    chosen = streams.stream(seed, "analysis samples").sample(total, count).sort().values
    kept, start = [], 0
    for x, y in batches:
        inside = chosen[(chosen >= start) & (chosen < start + len(y))] - start
        start += len(y)
        if len(inside):
            kept.append((take(x, inside), y[inside]))
    return kept


def placed(batches: list[Batch], device: torch.device, room: int) -> list[Batch]:
    """The batches on a device; if they take more than `room` bytes, only their labels."""
    sizes: list[int] = []
    map_inputs(lambda leaf: sizes.append(getattr(leaf, "nbytes", 0)), [x for x, _ in batches])
    fits = device == CPU or sum(sizes) <= room

    def there(leaf: Any) -> Any:
        return on(leaf, device) if fits and isinstance(leaf, Tensor) else leaf

    return [(map_inputs(there, x), on(y, device)) for x, y in batches]


def cut(batches: list[Batch], size: int, *, shared: bool = False) -> list[Batch]:
    """Cut batches of more than `size` samples into as few equal batches as possible.

    Args:
        shared: Make slightly more batches if several workers can then divide them evenly.
    """
    return [piece for batch in batches for piece in _cut(batch, size, shared)]


def _cut(batch: Batch, size: int, shared: bool) -> Iterator[Batch]:
    x, y = batch
    count = -(-len(y) // size)
    if shared:
        even = -(-count // LANES) * LANES if count > LANES else 1 << (count - 1).bit_length()
        count = min(even, len(y))
    for start, stop in pairwise(len(y) * i // count for i in range(count + 1)):
        yield take(x, slice(start, stop)), y[start:stop]


def lanes(count: int) -> list[range]:
    """Divide `count` batches into at most `LANES` ranges of consecutive batches."""
    parts = min(count, LANES)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
