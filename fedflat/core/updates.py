"""`Updates`: what several clients return, with one column per number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, overload

import numpy as np

from fedflat.core.sums import Summable
from fedflat.core.views import Update

NUMBERS = np.dtype(
    [
        ("client", "i8"),
        ("samples", "i8"),
        ("seconds", "f8"),
        ("weight", "f8"),
        ("steps", "i8"),
        ("weighted_steps", "f8"),
        ("loss", "f8"),
        ("norm", "f8"),
        ("floats", "i8"),
    ]
)
"""The numbers of an `Update`."""
NAMES = NUMBERS.names or ()
OWN = ("metrics", "delta", "buffers", "counters", "sent", "states")
"""What else an `Update` may have; most clients have none of it when their update travels."""
_numbers, _own = attrgetter(*NAMES), attrgetter(*OWN)


class Updates(Sequence[Update]):
    """The updates of clients that were done together, so that a thousand small clients cost a few operations.

    Attributes:
        numbers: One record of `NUMBERS` per client.
        failures: Why an update cannot be used, by its place.
        own: What clients have besides, by place: named fields of `Update`, without empty ones.
        terms: The sum of what the usable updates add to the sums of the round; None if there is none.
    """

    __slots__ = ("failures", "numbers", "own", "terms")

    def __init__(
        self,
        numbers: np.ndarray,
        failures: Mapping[int, str],
        own: Mapping[int, Mapping[str, Any]],
        terms: Summable | None = None,
    ) -> None:
        self.numbers, self.failures, self.own, self.terms = numbers, failures, own, terms

    @classmethod
    def of(cls, updates: Sequence[Update], terms: Summable | None = None) -> Updates:
        """Single updates, and the sum of their terms."""
        failures = {place: update.failure for place, update in enumerate(updates) if update.failure is not None}
        return cls(
            np.array([_numbers(update) for update in updates], NUMBERS),
            failures,
            {place: own for place, update in enumerate(updates) if (own := _kept(update))},
            terms,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> Update: ...
    @overload
    def __getitem__(self, place: slice) -> list[Update]: ...
    def __getitem__(self, place: int | slice) -> Update | list[Update]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        i, numbers = range(len(self))[place], dict(zip(NAMES, self.numbers[place].item(), strict=True))
        return Update(**numbers, failure=self.failures.get(i), **self.own.get(i, {}))

    @property
    def usable(self) -> Iterator[Update]:
        """The updates that can be used."""
        return (self[i] for i in range(len(self)) if i not in self.failures)

    @property
    def counted(self) -> np.ndarray:
        """The numbers of the updates that can be used."""
        return np.delete(self.numbers, list(self.failures)) if self.failures else self.numbers


def _kept(update: Update) -> dict[str, Any]:
    """Fields that are not empty."""
    metrics, delta, buffers, counters, sent, states = _own(update)
    if not (metrics or sent or states or delta.numel() or buffers.numel() or counters.numel()):
        return {}
    vectors = {"delta": delta, "buffers": buffers, "counters": counters}
    named = {"metrics": metrics, "sent": sent, "states": states}
    return {n: v for n, v in named.items() if v} | {n: v for n, v in vectors.items() if v.numel()}
