"""What the server must know of a client's data, and a federation that is made of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fedflat.core import streams
from fedflat.core.samples import Samples
from fedflat.data import Federation
from fedflat.data.samples import as_samples, labels_of
from fedflat.errors import InputError
from fedflat.flower import validation
from fedflat.flower.validation import Kind, RefusedError

TYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)}
AXES, LONGEST, CLASSES = 8, 1 << 20, 1 << 20  # what a client may claim at most


@dataclass(frozen=True)
class DataSummary:
    """Numbers of training and test samples, shape and type of one input and one target, largest label + 1 (or 0)."""

    samples: int
    tests: int
    x: Kind
    y: Kind
    classes: int

    @classmethod
    def of(cls, federation: Federation, client: int, dtype: str) -> DataSummary:
        """The summary of the only client of a federation. client: what to call it."""
        samples, test = federation.samples(0), federation.client_test(0)
        if not len(samples):
            raise InputError(f"client {client} has no training samples")
        x, y = _kinds(samples, federation, dtype, f"that of client {client}")
        classes = 0 if y[1].is_floating_point else federation.classes
        return cls(len(samples), len(test) if test else 0, x, y, classes)

    def values(self) -> dict[str, Any]:
        """As plain values."""
        plain: dict[str, Any] = {"samples": self.samples, "tests": self.tests, "classes": self.classes}
        for name, (shape, dtype) in (("x", self.x), ("y", self.y)):
            plain |= {f"{name}_shape": list(shape), f"{name}_type": str(dtype).removeprefix("torch.")}
        return plain

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> DataSummary:
        """The inverse of `values`, for what a stranger sent."""
        record = ConfigRecord(dict(values))
        counts = validation.whole(record, "samples", 1), validation.whole(record, "tests")
        return cls(*counts, kind(record, "x"), kind(record, "y"), validation.whole(record, "classes", 0, CLASSES))


def _kinds(samples: Samples, federation: Federation, dtype: str, whose: str) -> tuple[Kind, Kind]:
    x, y = samples.batch(torch.zeros(1, dtype=torch.int64))
    x = federation.preprocess(x, None, getattr(torch, dtype))
    if not isinstance(x, Tensor):
        raise InputError(f"on Flower an input must be one tensor; {whose} is a {type(x).__name__}")
    return validation.kind_of(x[0]), validation.kind_of(y[0])


def sample_kinds(test: Any, dtype: str) -> tuple[Kind, Kind]:
    """Shape and type of one input and one target of a common test set, or of a federation that has one."""
    given = test if isinstance(test, Federation) else Federation([as_samples(test, "the test set")])
    samples = test_of(test)
    assert samples is not None
    return _kinds(samples, given, dtype, "that of the test set")


def classes_of(test: Any) -> int:
    """Number of classes of a common test set, or of a federation that has one; 0 where targets are no classes."""
    samples = test_of(test)
    labels = torch.empty(0) if samples is None else labels_of(samples)
    known = test.classes if isinstance(test, Federation) and not labels.is_floating_point() else 0
    return 0 if labels.is_floating_point() else max(known, 1 + int(labels.max()))


def test_of(test: Any) -> Samples | None:
    """The common test set in what a user gives as such: samples, a federation that may have one, or None."""
    return test.test if isinstance(test, Federation) else None if test is None else as_samples(test, "the test set")


def labelled(samples: Samples) -> bool:
    """Whether the targets are classes."""
    return not samples.batch(torch.zeros(1, dtype=torch.int64))[1].is_floating_point()


def kind(record: ConfigRecord, name: str) -> Kind:
    """Shape and type of one input, "x", or target, "y", as somebody describes them."""
    shape, dtype = record.get(f"{name}_shape"), record.get(f"{name}_type")
    fine = isinstance(shape, list) and len(shape) <= AXES and all(type(n) is int and 0 < n <= LONGEST for n in shape)
    if not fine or not isinstance(dtype, str) or dtype not in TYPES:
        raise RefusedError(f"describes its samples as {validation.printable((shape, dtype))}")
    return tuple(shape), TYPES[dtype]


class Blank:
    """So many samples of which only the form is known: their numbers are made up."""

    def __init__(self, count: int, summary: DataSummary, classes: int) -> None:
        self._count, self._summary, self._classes = count, summary, classes

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Noise, and labels in turn."""
        (shape, dtype), (label_shape, label_type) = self._summary.x, self._summary.y
        x = streams.stream(0, "blank").normal((len(indices), *shape), torch.float64)
        y = (indices % max(1, self._classes)).reshape(-1, *(1 for _ in label_shape)).expand(-1, *label_shape)
        return (x if dtype.is_floating_point else x.abs().clamp(max=1)).to(dtype), y.to(label_type)


def federation_of(summaries: Sequence[DataSummary], test: Any, classes: int, trusted: Any = None) -> Federation:
    """A federation of clients whose data are elsewhere.

    Args:
        summaries: What is known of each client.
        test: The common test set, or a federation that has one, or None.
        classes: Number of classes; 0 where targets are no classes.
        trusted: The server's own clean samples, if it has any.
    """
    given = test if isinstance(test, Federation) else None
    tests = [Blank(one.tests, one, classes) if one.tests else None for one in summaries]
    return Federation(
        [Blank(one.samples, one, classes) for one in summaries],
        test_of(test),
        tests if any(tests) else None,
        sizes=[one.samples for one in summaries],
        classes=classes or None,
        preprocess=given.preprocess if given else None,
        trusted=trusted,
        name="flower",
        task=given.task if given else None,
    )
