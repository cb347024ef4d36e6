"""`compare`: runs beside each other, those that differ in nothing but the seed as one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedflat.callbacks import falls
from fedflat.calls import split
from fedflat.errors import InputError
from fedflat.report.comparison import Comparison, Row
from fedflat.report.records import (
    TAIL,
    Record,
    check_metric,
    differing,
    first_measured,
    grouped,
    records_of,
    round_reaching,
)
from fedflat.report.significance import ENOUGH, compared
from fedflat.report.words import percent

if TYPE_CHECKING:
    from fedflat.result import Run

NO_TEST = {"p": None, "test": None, "better": None}


def compare(
    runs: str | Path | Iterable[Run | Record | str | Path],
    by: str | Sequence[str] = (),
    metric: str = "accuracy",
    targets: Sequence[float] = (),
) -> Comparison:
    """Put runs beside each other, one row for those that differ in nothing but the seed.

    runs: runs, run folders or folders of those, finished or not; significance is that against the first one's row.
    by: fields of the experiment to group by instead, such as "method" or ["method", "data"].
    metric: any in the runs' metrics; "personal_…" is that of the common model where clients have no other.
    targets: values of the metric to count the rounds to.
    """
    records = records_of(runs)
    if not records:
        raise InputError("there are no runs to compare: give runs or run folders")
    check_metric(metric, records)
    groups = grouped(records, split(by) if isinstance(by, str) else by)
    rows = [_row(label, group, metric, targets) for label, group in groups.items()]
    first, *others = groups.values()
    verdicts = [_verdict(group, first, metric) for group in others]
    rows = [row | verdict for row, verdict in zip(rows, [NO_TEST, *verdicts], strict=True)]
    return Comparison(rows, metric, tuple(targets), list(_notes(rows, groups, metric)))


def _row(label: str, records: Sequence[Record], metric: str, targets: Sequence[float]) -> Row:
    row: Row = {
        "runs": label,
        "seeds": [record.experiment.seed for record in records],
        "rounds": [record.rounds for record in records],
        "unfinished": sum(record.unfinished for record in records),
    }
    row |= _spread("last", [record.last(_own(record, metric)) for record in records])
    row |= _spread("best", [_best(record, metric) for record in records])
    row |= _spread("tail", [record.tail(_own(record, metric)) for record in records])
    for target in targets:
        row |= _reached(f"to_{target:g}", records, metric, target)
    row |= _spread("low5", [record.last(_own(record, "personal_low5")) for record in records])
    costs = [record.cost() for record in records]
    return row | {name: fmean(cost[name] for cost in costs) for name in costs[0]}


def _spread(name: str, values: Sequence[float | None]) -> Row:
    """Mean and sample standard deviation of the values there are."""
    found = [value for value in values if value is not None]
    return {name: fmean(found) if found else None, f"{name}_std": stdev(found) if len(found) > 1 else None}


def _own(record: Record, metric: str) -> str:
    """What a run calls a metric: clients for whom a method keeps no model of their own use the common one."""
    return first_measured([record], metric, metric.replace("personal_", "clients_"))


def _best(record: Record, metric: str) -> float | None:
    values = [value for _, value in record.points(_own(record, metric))]
    return (min if falls(metric) else max)(values, default=None)


def _reached(name: str, records: Sequence[Record], metric: str, target: float) -> Row:
    """The rounds to a target: of the mean curve, as far as all runs have come, and of each run."""
    sign = -1 if falls(metric) else 1
    curves = [{round: sign * value for round, value in record.points(_own(record, metric))} for record in records]
    common = sorted(set(curves[0]).intersection(*curves))
    mean = {round: fmean(curve[round] for curve in curves) for round in common}
    first, *others = (round_reaching(curve.items(), sign * target) for curve in (mean, *curves))
    return {name: first, f"{name}_runs": others}


def _verdict(group: Sequence[Record], first: Sequence[Record], metric: str) -> Row:
    """Whether the tail averages of a group differ from the first one's by more than chance, or why nobody can tell."""
    sides = [_tails(group, metric), _tails(first, metric)]
    if not all(sides):
        return NO_TEST
    if any(record.unfinished for record in (*group, *first)):
        return NO_TEST | {"test": "unfinished"}
    if sum(map(len, sides)) < len(group) + len(first):
        return NO_TEST | {"test": "repeated seeds"}
    test = compared(*sides)
    if test is None:
        return NO_TEST | {"test": "too few seeds"}
    return {"p": test.p, "test": test.name, "better": test.statistic < 0 if falls(metric) else test.statistic > 0}


def _tails(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Tail averages by seed."""
    tails = {record.experiment.seed: record.tail(_own(record, metric)) for record in records}
    return {seed: tail for seed, tail in tails.items() if tail is not None}


def _notes(rows: Sequence[Row], groups: Mapping[str, Sequence[Record]], metric: str) -> Iterator[str]:
    """What a reader must know of the table, sentence by sentence."""
    last = percent(TAIL, 0)
    yield f"tail: mean over the last {last} of the rounds; ±: sample standard deviation over the runs of a row."
    tests = " or ".join(dict.fromkeys(row["test"] for row in rows if row["p"] is not None))
    if tests:
        yield f"p: two-sided {tests} of the tail averages against the first row, not corrected for the number of rows."
    if any(row["test"] == "too few seeds" for row in rows):
        yield f"A test of significance takes at least {ENOUGH} seeds on both sides."
    if any(name.startswith("to_") for name in rows[0]):
        yield "to X: first round at which the mean curve (each run) reaches X; T+: not within T rounds."
    yield "up, down: numbers that all clients sent and got in a run; steps: local steps of all clients."
    for label, records in groups.items():
        if mixed := [name for name in differing(records) if name != "seed"]:
            yield f"The runs of {label} differ in {', '.join(mixed)}, too."
    if metric == "accuracy" and any(row["last"] is None and row["low5"] is not None for row in rows):
        yield "No accuracy: such methods have no common model; compare by the metric personal_mean."
