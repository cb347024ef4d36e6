"""The quantity that a paper reports for a run: `last()`, `tail(rounds=100)`, `rounds_to(target=0.5)`, `lambda_max()`, …

Quantities of the Hessian are read from the run folder, where an analysis (`STUDY_OF`) has written them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from fedflat import specs
from fedflat.core.curves import is_share, round_reaching, tail_mean
from fedflat.experiment import Experiment
from fedflat.runs.records import Record
from fedflat.words import MISSING

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
    return tail_mean(record.points(metric), rounds, end) if record.rounds >= end else None


def rounds_to(record: Record, target: float, metric: str = "accuracy") -> float | None:
    """The first round in which a metric reaches a target; infinite if it never does."""
    round = round_reaching(record.points(metric), target)
    return math.inf if round is None else float(round)


def at(record: Record, metric: str, watched: str, below: float) -> float | None:
    """A metric in the first round in which another one, such as a training loss, is at most `below`; None if never."""
    reached = next((round for round, value in record.points(watched) if value <= below), None)
    return dict(record.points(metric)).get(reached) if reached is not None else None


def lambda_max(record: Record) -> float | None:
    """The largest eigenvalue of the Hessian."""
    return _analysed(record, "curvature", "λ max")


def lambda_ratio(record: Record) -> float | None:
    """λ₁ / λ₅."""
    return _analysed(record, "curvature", "λ1/λ5")


def trace(record: Record) -> float | None:
    """The trace of the Hessian."""
    return _analysed(record, "curvature", "trace")


def convexity(record: Record) -> float | None:
    """|λmax / λmin|."""
    return _analysed(record, "curvature", "|λmax/λmin|")


def h_n(record: Record) -> float | None:
    """H_N of the FedAlign paper: how much the norms of the clients' Hessians differ."""
    return _analysed(record, "clients", "H_N")


def h_d(record: Record) -> float | None:
    """H_D of the FedAlign paper: how much the directions of the clients' Hessians agree."""
    return _analysed(record, "clients", "H_D")


def _analysed(record: Record, study: str, figure: str) -> float | None:
    path = record.path / "analysis" / f"{study}.json" if record.path else None
    if path is None or not path.exists():
        return None
    found: dict[str, float] = json.loads(path.read_text()).get("headline", {})
    return found.get(figure)


STUDY_OF = {"lambda_max": "curvature", "lambda_ratio": "curvature", "trace": "curvature", "convexity": "curvature"}
STUDY_OF |= {"h_n": "clients", "h_d": "clients"}
"""The analysis that a quantity needs, as in `fedflat analyze --what`."""
QUANTITIES: dict[str, Quantity] = {
    quantity.__name__: quantity
    for quantity in (last, best, tail, rounds_to, at, lambda_max, lambda_ratio, trace, convexity, h_n, h_d)
}


def study_of(quantity: str) -> str | None:
    """The analysis that a quantity such as "trace()" needs; None for what a run records itself."""
    return STUDY_OF.get(specs.parse(quantity).name)


def measured(quantity: str, record: Record) -> float | None:
    """The value of a quantity, such as "tail(rounds=100)", for a run; None if it cannot be computed yet."""
    return specs.build("quantity", specs.parse(quantity), QUANTITIES, record)


def check_quantity(quantity: str) -> None:
    """Refuse what no run has: an unknown name, or a value that does not fit."""
    measured(quantity, Record(Experiment(), []))


def by_seed(quantity: str, records: Sequence[Record]) -> dict[int, float]:
    """The values of a quantity by the seeds of the runs, accuracies in percent; runs without a value are left out."""
    factor = 100 if _is_share(quantity) else 1
    pairs = ((record.experiment.seed, measured(quantity, record)) for record in records)
    return {seed: value * factor for seed, value in pairs if value is not None}


def summary(quantity: str, records: Sequence[Record]) -> dict[str, float | None]:
    """Mean and sample standard deviation of a quantity over runs, accuracies in percent; None without values."""
    found = [value for record in records for value in by_seed(quantity, [record]).values()]
    deviation = stdev(found) if len(found) > 1 and all(map(math.isfinite, found)) else None
    return {"mean": fmean(found) if found else None, "std": deviation}


def _is_share(quantity: str) -> bool:
    """Whether a quantity is a share, such as an accuracy, which tables state in percent."""
    call = specs.parse(quantity)
    given = inspect.signature(QUANTITIES[call.name]).bind(None, *call.args, **call.kwargs)
    given.apply_defaults()
    metric = str(given.arguments.get("metric", ""))
    return call.name != "rounds_to" and (is_share(metric) or metric.startswith(("clients_", "personal_")))


def shown(quantity: str, mean: float | None, std: float | None, rounds: int) -> str:
    """A summary as text: percent with two decimals, rounds as whole numbers, "T+" for a target not reached.

    >>> shown("last()", 40.9, 0.62, 500), shown("rounds_to(target=0.5)", math.inf, None, 500)
    ('40.90 ± 0.62', '500+')
    """
    if mean is None:
        return MISSING
    if math.isinf(mean):
        return f"{rounds}+"
    form = "{:.0f}" if specs.parse(quantity).name == "rounds_to" else "{:.4g}" if study_of(quantity) else "{:.2f}"
    return form.format(mean) + ("" if std is None else f" ± {form.format(std)}")
