"""What the updates of a round amount to, and the rows of the clients in the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np
from torch import Tensor

from fedflat.core.updates import NUMBERS, Updates
from fedflat.engine.evaluation import Row

COLUMNS = {"client": "client", "samples": "samples", "steps": "steps", "loss": "loss", "update_norm": "norm"}
"""Columns of the records, and the numbers of an update that they hold."""


class Tally:
    """Collects the numbers of a round while updates arrive; its sums are there when all have arrived.

    Attributes:
        left_out: Clients whose updates cannot be used, and why.
        metrics: What parts have recorded, by client.
        counters: Those of the largest client; None if nobody has any.
        void: Whether the round changes nothing.
    """

    def __init__(self) -> None:
        self.left_out: list[tuple[int, str]] = []
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.counters: Tensor | None = None
        self.void = False
        self._blocks, self._largest = list[bytes](), -1

    def add(self, updates: Updates) -> None:
        """Add those that can be used."""
        self._blocks.append(updates.counted.tobytes())
        clients, sizes = updates.numbers["client"], updates.numbers["samples"]
        self.left_out += [(int(clients[place]), why) for place, why in updates.failures.items()]
        for place, own in updates.own.items():
            if place not in updates.failures:
                if "metrics" in own:
                    self.metrics[int(clients[place])] = own["metrics"]
                if "counters" in own and sizes[place] > self._largest:
                    self._largest, self.counters = sizes[place], own["counters"].clone()

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of the usable updates, in the order of training."""
        return np.frombuffer(bytearray().join(self._blocks), NUMBERS)  # NumPy joins records several times as slowly

    def total(self, name: str) -> float:
        """The sum of a column. Terms are added one after the other, so that it does not depend on the blocks."""
        return _sum(self.numbers[name])

    @property
    def loss(self) -> float | None:
        """The mean training loss over the samples of the clients that have one; None without any."""
        losses, samples = self.numbers["loss"], self.numbers["samples"]
        known = ~np.isnan(losses)
        if not known.all():
            losses, samples = losses[known], samples[known]
        total = int(samples.sum())
        return _sum(losses * samples) / total if total else None

    @property
    def floats(self) -> int:
        """How many numbers a client has sent."""
        return int(self.numbers["floats"][-1]) if len(self.numbers) else 0

    def rows(self, round: int) -> Rows:
        """The clients' rows, ordered by client."""
        return Rows(round, self.numbers, self.metrics)


def _sum(values: np.ndarray) -> float:
    return float(np.add.accumulate(values, dtype=np.float64)[-1]) if len(values) else 0.0


class Rows(Sequence[Row]):
    """The clients' rows of a round, ordered by client. They are made when somebody reads them: there may be thousands.

    Args:
        round: The round.
        numbers: One record of `NUMBERS` per client.
        metrics: What parts have recorded, by client.
    """

    def __init__(self, round: int, numbers: np.ndarray, metrics: Mapping[int, Mapping[str, float]]) -> None:
        self._round, self._numbers, self._metrics = round, numbers, metrics

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Row]:
        numbers = self._numbers[np.argsort(self._numbers["client"], kind="stable")]
        columns = [numbers[name].tolist() for name in COLUMNS.values()]
        names, seconds = ("round", *COLUMNS, "seconds"), np.round(numbers["seconds"], 6).tolist()
        for values in zip([self._round] * len(self), *columns, seconds, strict=True):
            yield {**dict(zip(names, values, strict=True)), **self._metrics.get(values[1], {})}

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return list(self)[place]


def told(blocks: Iterator[Updates], asked: int, arrived: Callable[[int, int], object]) -> Iterator[Updates]:
    """The updates of a round; `arrived` is told that some are there, with how many there are and will be."""
    done = 0
    for updates in blocks:
        done += len(updates)
        arrived(done, asked)
        yield updates
