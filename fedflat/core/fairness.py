"""How evenly a federation serves its clients: the distribution of their accuracies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedflat.errors import InputError

SUMMARY = ("mean", "std", "min", "max", "low5", "top5")


@dataclass(frozen=True)
class Fairness:
    """The clients' accuracies (or another metric), each on its own test data; all clients have the same weight.

    Attributes:
        accuracies: The values in increasing order.
        falls: Whether less is better, as of an error.

    >>> Fairness.of([0.2, 0.4, 0.6]).low5
    0.2
    """

    accuracies: tuple[float, ...]
    falls: bool = False

    @classmethod
    def of(cls, accuracies: Iterable[float], falls: bool = False) -> Fairness:
        """Summarise accuracies, given in any order."""
        values = tuple(sorted(float(a) for a in accuracies))
        if not values:
            raise InputError("there are no accuracies of clients to summarise: give the clients test data")
        if not all(math.isfinite(a) for a in values):
            raise InputError("an accuracy is not a finite number")
        return cls(values, falls)

    @cached_property
    def _values(self) -> np.ndarray:
        return np.array(self.accuracies)

    @property
    def _ordered(self) -> np.ndarray:
        """The values, the worst first."""
        return self._values[::-1] if self.falls else self._values

    @property
    def _tail(self) -> int:
        return max(1, math.ceil(0.05 * len(self.accuracies) - 1e-9))

    @property
    def mean(self) -> float:
        """Unweighted mean over the clients."""
        return float(self._values.mean())

    @property
    def variance(self) -> float:
        """Mean squared distance from the mean (divided by the number of clients)."""
        return float(self._values.var())

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return float(self._values.std())

    @property
    def min(self) -> float:
        """The lowest value."""
        return self.accuracies[0]

    @property
    def max(self) -> float:
        """The highest value."""
        return self.accuracies[-1]

    @property
    def low5(self) -> float:
        """Mean of the worst 5 % (the lowest accuracies, the highest errors), at least one client."""
        return float(self._ordered[: self._tail].mean())

    @property
    def top5(self) -> float:
        """Mean of the best 5 %, at least one client."""
        return float(self._ordered[-self._tail :].mean())

    def quantile(self, q: float) -> float:
        """The accuracy below which a fraction q of the clients lies."""
        return float(np.quantile(self._values, q))

    def share_below(self, threshold: float) -> float:
        """Fraction of the clients with an accuracy below `threshold`."""
        return float((self._values < threshold).mean())

    def histogram(self, bins: int = 20) -> list[int]:
        """Number of clients in each of `bins` equal intervals of [0, 1]; the last one includes 1."""
        return [int(n) for n in np.histogram(self._values, bins=bins, range=(0.0, 1.0))[0]]

    def summary(self) -> dict[str, float]:
        """The statistics in `SUMMARY` by name."""
        return {name: getattr(self, name) for name in SUMMARY}

    def to_dict(self) -> dict[str, Any]:
        """All statistics and some quantiles as plain values."""
        quantiles = {f"q{round(100 * q):02d}": self.quantile(q) for q in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)}
        return {"clients": len(self.accuracies), **self.summary(), "variance": self.variance, **quantiles}
