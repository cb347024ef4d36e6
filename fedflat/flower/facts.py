"""What the server must know of a client's data, and a federation that is made of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fedflat.data import Federation, Samples
from fedflat.data.samples import as_samples, labels_of
from fedflat.errors import InputError
from fedflat.flower import wire
from fedflat.flower.wire import Kind, RefusedError

TYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)}
AXES, LONGEST, CLASSES = 8, 1 << 20, 1 << 20  # what a client may claim at most


@dataclass(frozen=True)
class Facts:
    """Numbers of training and test samples, shape and type of one input and one target, largest label + 1 (or 0)."""

    samples: int
    tests: int
    x: Kind
    y: Kind
    classes: int

    @classmethod
    def of(cls, federation: Federation, client: int, dtype: str) -> Facts:
        """The facts of the only client of a federation. client: what to call it."""
        samples, test = federation.samples(0), federation.client_test(0)
        if not len(samples):
            raise InputError(f"client {client} has no training samples")
        x, y = samples.batch(torch.zeros(1, dtype=torch.int64))
        x = federation.preprocess(x, None, getattr(torch, dtype))
        if not isinstance(x, Tensor):
            raise InputError(f"on Flower an input must be one tensor; that of client {client} is a {type(x).__name__}")
        classes = 0 if y.is_floating_point() else federation.classes
        return cls(len(samples), len(test) if test else 0, wire.kind_of(x[0]), wire.kind_of(y[0]), classes)

    def values(self) -> dict[str, Any]:
        """As plain values."""
        plain: dict[str, Any] = {"samples": self.samples, "tests": self.tests, "classes": self.classes}
        for name, (shape, dtype) in (("x", self.x), ("y", self.y)):
            plain |= {f"{name}_shape": list(shape), f"{name}_type": str(dtype).removeprefix("torch.")}
        return plain

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Facts:
        """The inverse of `values`, for what a stranger sent."""
        record = ConfigRecord(dict(values))
        counts = wire.whole(record, "samples", 1), wire.whole(record, "tests")
        return cls(*counts, _kind(record, "x"), _kind(record, "y"), wire.whole(record, "classes", 0, CLASSES))


def labelled(samples: Samples) -> bool:
    """Whether the targets are classes."""
    return not samples.batch(torch.zeros(1, dtype=torch.int64))[1].is_floating_point()


def _kind(record: ConfigRecord, name: str) -> Kind:
    shape, dtype = record.get(f"{name}_shape"), record.get(f"{name}_type")
    fine = isinstance(shape, list) and len(shape) <= AXES and all(type(n) is int and 0 < n <= LONGEST for n in shape)
    if not fine or dtype not in TYPES:
        raise RefusedError(f"describes its samples as {wire.printable((shape, dtype))}")
    return tuple(shape), TYPES[dtype]


class Blank:
    """So many samples of which only the form is known: their numbers are made up."""

    def __init__(self, count: int, facts: Facts, classes: int) -> None:
        self._count, self._facts, self._classes = count, facts, classes

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Noise, and labels in turn."""
        (shape, dtype), (label_shape, label_type) = self._facts.x, self._facts.y
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((len(indices), *shape), generator=generator, dtype=torch.float64)
        y = (indices % max(1, self._classes)).reshape(-1, *(1 for _ in label_shape)).expand(-1, *label_shape)
        return (x if dtype.is_floating_point else x.abs().clamp(max=1)).to(dtype), y.to(label_type)


def federation_of(facts: Sequence[Facts], test: Any = None) -> Federation:
    """A federation of clients whose data are elsewhere. test: the common test set, or a federation that has one."""
    given = test if isinstance(test, Federation) else None
    samples = given.test if given else None if test is None else as_samples(test, "the test set")
    classes = max(max(one.classes for one in facts), _classes(samples))
    tests = [Blank(one.tests, one, classes) if one.tests else None for one in facts]
    return Federation(
        [Blank(one.samples, one, classes) for one in facts],
        samples,
        tests if any(tests) else None,
        sizes=[one.samples for one in facts],
        classes=classes or None,
        preprocess=given.preprocess if given else None,
        name="flower",
    )


def _classes(test: Samples | None) -> int:
    labels = torch.empty(0) if test is None else labels_of(test)
    return 0 if labels.is_floating_point() else 1 + int(labels.max())
