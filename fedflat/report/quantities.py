"""The figure that a paper reports of a run: `last()`, `tail(rounds=100)`, `rounds_to(target=0.5)`, …"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from fedflat import calls
from fedflat.report.records import Record, round_reaching
from fedflat.report.words import MISSING

Quantity = Callable[..., float | None]


def last(record: Record, metric: str = "accuracy") -> float | None:
    """A metric after the last round."""
    return record.last(metric)


def best(record: Record, metric: str = "accuracy") -> float | None:
    """The highest value of a metric."""
    found = record.best(metric)
    return found[1] if found else None


def tail(record: Record, rounds: int, until: int | None = None, metric: str = "accuracy") -> float | None:
    """The mean of a metric over the evaluations of the last rounds up to and including round `until`."""
    end = until or record.rounds
    values = [value for round, value in record.points(metric) if end - rounds < round <= end]
    return fmean(values) if values and record.rounds >= end else None


def rounds_to(record: Record, target: float, metric: str = "accuracy") -> float | None:
    """The first round at which a metric reaches a target; infinite where it never does."""
    round = round_reaching(record.points(metric), target)
    return math.inf if round is None else float(round)


QUANTITIES: dict[str, Quantity] = {quantity.__name__: quantity for quantity in (last, best, tail, rounds_to)}


def measured(quantity: str, record: Record) -> float | None:
    """The figure of a run that `quantity`, such as "tail(rounds=100)", names; None while there is none."""
    return calls.build("quantity", calls.parse(quantity), QUANTITIES, record)


def summary(quantity: str, records: Sequence[Record]) -> dict[str, float | None]:
    """Mean and sample standard deviation of a figure over runs, accuracies in percent; None where there is none."""
    factor = 1 if calls.parse(quantity).name == "rounds_to" else 100
    found = [value * factor for record in records if (value := measured(quantity, record)) is not None]
    deviation = stdev(found) if len(found) > 1 and all(map(math.isfinite, found)) else None
    return {"mean": fmean(found) if found else None, "std": deviation}


def shown(quantity: str, mean: float | None, std: float | None, rounds: int) -> str:
    """A summary as text: percent with two decimals, rounds as whole numbers, T+ for a target that was not reached.

    >>> shown("last()", 40.9, 0.62, 500), shown("rounds_to(target=0.5)", math.inf, None, 500)
    ('40.90 ± 0.62', '500+')
    """
    if mean is None:
        return MISSING
    if math.isinf(mean):
        return f"{rounds}+"
    digits = 0 if calls.parse(quantity).name == "rounds_to" else 2
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
