"""`compare`: a table of runs, one row for all runs that differ only in the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from fedflat.core.curves import round_reaching
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import IRRELEVANT
from fedflat.report.comparison import Comparison, Row
from fedflat.report.significance import ENOUGH, compared, holm
from fedflat.runs.records import (
    TAIL,
    Record,
    RunLike,
    check_metric,
    differing,
    first_measured,
    grouped,
    lead_of,
    records_of,
    shared_setting,
)
from fedflat.specs import split
from fedflat.words import percent

NO_TEST = {"p": None, "test": None, "better": None}


def compare(
    runs: str | Path | Iterable[RunLike | Record | str | Path],
    by: str | Sequence[str] = (),
    metric: str = "",
    targets: Sequence[float] = (),
    baseline: str = "",
    holm: bool = False,
    ordered: bool = False,
) -> Comparison:
    """Compare runs in a table with one row for all runs that differ only in the seed.

    Args:
        runs: Runs, run folders or folders of run folders, finished or not. Each row is tested against the row with the
            baseline method and otherwise the same settings.
        by: Fields of the experiment to group by instead, such as "method" or ["method", "data"].
        metric: Any metric of the runs, instead of the leading one of their task; "personal_…" means the common model if
            clients have no model of their own.
        targets: Values of the metric; for each, the table has the number of rounds to reach it.
        baseline: A method, written in any way; by default that of the first run.
        holm: Whether to correct the p-values for their number, by Holm's method.
        ordered: Whether the best tail average comes first.
    """
    records = records_of(runs)
    if not records:
        raise InputError("there are no runs to compare: give runs or run folders")
    metric = metric or lead_of(records)
    check_metric(metric, records)
    groups = grouped(records, split(by) if isinstance(by, str) else by)
    rows = [_row(label, group, metric, targets) for label, group in groups.items()]
    bases = _bases(list(groups.values()), baseline)
    verdicts = [_verdict(group, base, metric) for group, base in zip(groups.values(), bases, strict=True)]
    rows = [row | verdict for row, verdict in zip(rows, corrected(verdicts) if holm else verdicts, strict=True)]
    if ordered:
        sign = 1 if records[0].falls(metric) else -1
        rows.sort(key=lambda row: math.inf if row["tail"] is None else sign * row["tail"])
    return Comparison(rows, metric, tuple(targets), list(_notes(rows, groups, metric)))


def _bases(groups: Sequence[Sequence[Record]], baseline: str) -> list[Sequence[Record] | None]:
    """For every group the one that it is tested against: the baseline method in the same setting; None if absent."""
    method = groups[0][0].experiment.method
    if baseline:
        known = dict.fromkeys(group[0].experiment.method for group in groups)
        method = baseline if baseline in known else _canonical(baseline)
        if method not in known:
            raise UnknownNameError("method among these runs:", baseline, known)
    if all(group[0].experiment.method == method for group in groups):  # only settings differ: compare these
        return [None, *[groups[0]] * (len(groups) - 1)]
    settings = [_setting(group[0]) for group in groups]
    found = {
        setting: group
        for setting, group in reversed(list(zip(settings, groups, strict=True)))
        if group[0].experiment.method == method
    }
    return [
        None if group[0].experiment.method == method else found.get(setting)
        for setting, group in zip(settings, groups, strict=True)
    ]


def _setting(record: Record) -> tuple[object, ...]:
    """All fields but the method, the seed and those that change no result."""
    fields = record.experiment.to_dict()
    return tuple(value for name, value in fields.items() if name not in ("method", "seed", *IRRELEVANT))


def _canonical(method: str) -> str:
    from fedflat.core.method import Method  # needs torch, which a comparison does not

    try:
        return str(Method.parse(method))
    except InputError:
        return method


def corrected(verdicts: Sequence[Row]) -> list[Row]:
    """Verdicts with p-values that Holm's method corrects for their number."""
    adjusted = holm([row["p"] for row in verdicts])
    return [row if p is None else row | {"p": p, "holm": True} for row, p in zip(verdicts, adjusted, strict=True)]


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
    """Mean and sample standard deviation of the values that are not None."""
    found = [value for value in values if value is not None]
    return {name: fmean(found) if found else None, f"{name}_std": stdev(found) if len(found) > 1 else None}


def _own(record: Record, metric: str) -> str:
    """The name of a metric in a run: clients without a model of their own use the common one."""
    return first_measured([record], metric, metric.replace("personal_", "clients_"))


def _best(record: Record, metric: str) -> float | None:
    values = [value for _, value in record.points(_own(record, metric))]
    return (min if record.falls(metric) else max)(values, default=None)


def _reached(name: str, records: Sequence[Record], metric: str, target: float) -> Row:
    """Rounds to a target: of the mean curve, over the rounds that all runs have, and of each run."""
    sign = -1 if records[0].falls(metric) else 1
    curves = [{round: sign * value for round, value in record.points(_own(record, metric))} for record in records]
    common = sorted(set(curves[0]).intersection(*curves))
    mean = {round: fmean(curve[round] for curve in curves) for round in common}
    first, *others = (round_reaching(curve.items(), sign * target) for curve in (mean, *curves))
    return {name: first, f"{name}_runs": others}


def _verdict(group: Sequence[Record], first: Sequence[Record] | None, metric: str) -> Row:
    """Whether a group's tail averages differ significantly from the baseline's, or why there is no test."""
    if first is None:
        return NO_TEST
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
    return {"p": test.p, "test": test.name, "better": (test.statistic < 0) == group[0].falls(metric)}


def _tails(records: Sequence[Record], metric: str) -> dict[int, float]:
    """Tail averages by seed."""
    tails = {record.experiment.seed: record.tail(_own(record, metric)) for record in records}
    return {seed: tail for seed, tail in tails.items() if tail is not None}


def _notes(rows: Sequence[Row], groups: Mapping[str, Sequence[Record]], metric: str) -> Iterator[str]:
    """What the runs have in common, and explanations of the table."""
    yield f"{shared_setting([record for group in groups.values() for record in group])}."
    last = percent(TAIL, 0)
    yield f"tail: mean over the last {last} of the rounds; ±: sample standard deviation over the runs of a row."
    tests = " or ".join(dict.fromkeys(row["test"] for row in rows if row["p"] is not None))
    if tests:
        how = "corrected by Holm's method" if any(row.get("holm") for row in rows) else "not corrected for their number"
        yield f"p: two-sided {tests} of the tail averages against the baseline in the same setting, {how}."
    if any(row["test"] == "too few seeds" for row in rows):
        yield f"A significance test needs at least {ENOUGH} seeds on both sides."
    if any(name.startswith("to_") for name in rows[0]):
        yield "to X: first round in which the mean curve (each run) reaches X; T+: not within T rounds."
    yield "up, down: numbers that all clients sent and received in a run; steps: local steps of all clients."
    for label, records in groups.items():
        if mixed := [name for name in differing(records) if name != "seed"]:
            yield f"The runs of {label} differ in {', '.join(mixed)}, too."
    if metric == "accuracy" and any(row["last"] is None and row["low5"] is not None for row in rows):
        yield "No accuracy: these methods have no common model; compare by the metric personal_mean."
