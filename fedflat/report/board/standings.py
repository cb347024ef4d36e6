"""The rows of a leaderboard and its statistics: paired tests, mean ranks, critical-difference groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedflat.core.curves import round_reaching
from fedflat.report.board.entry import BASELINE, Entry
from fedflat.report.significance import compared, holm
from fedflat.runs.records import Record

Row = dict[str, Any]


def rows_of(entries: Sequence[Entry]) -> list[Row]:
    """One dict per method and setting, best accuracy first within a setting; failed ones last."""
    baselines = {entry.setting: entry for entry in entries if entry.method == BASELINE}
    rows = [_row(entry, baselines.get(entry.setting)) for entry in entries]
    for setting in baselines:
        tested = [row for row in rows if row["setting"] == setting]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p_holm"] = p
    order = {setting: place for place, setting in enumerate(dict.fromkeys(row["setting"] for row in rows))}
    return sorted(rows, key=lambda row: (order[row["setting"]], -(row["accuracy"] or -1), row["method"]))


def _row(entry: Entry, baseline: Entry | None) -> Row:
    values, others = _accuracies(entry), _accuracies(baseline) if baseline else {}
    test = compared(values, others) if entry.method != BASELINE and values and others else None
    return {
        "setting": entry.setting,
        "method": entry.method,
        "chosen": entry.chosen.method if entry.chosen else None,
        "lr": entry.chosen.lr if entry.chosen else None,
        "seeds": len(values),
        "accuracy": fmean(values.values()) if values else None,
        "std": stdev(values.values()) if len(values) > 1 else None,
        "p": test.p if test else None,
        "p_holm": None,
        "better": bool(values and others) and fmean(values.values()) > fmean(others.values()),
        "rounds_to": _mean(entry.records, lambda record: _reaches(record, baseline)),
        "low5": _mean(entry.records, lambda record: record.last("clients_low5")),
        "lambda_max": entry.curvature.get("λ max"),
        "ratio5": entry.curvature.get("λ1/λ5"),
        "trace": entry.curvature.get("trace"),
        "floats": _mean(entry.records, _floats),
        "time": entry.time,
        "failure": entry.failure,
        "folders": [record.path.name for record in entry.records if record.path],
    }


def _accuracies(entry: Entry) -> dict[int, float]:
    """Accuracy by seed: the mean over the last tenth of the rounds."""
    pairs = ((record.experiment.seed, record.tail()) for record in entry.records)
    return {seed: value for seed, value in pairs if value is not None}


def _mean(records: Sequence[Record], value: Any) -> float | None:
    found = [number for record in records if (number := value(record)) is not None]
    return fmean(found) if found and len(found) == len(records) else None


def _floats(record: Record) -> float:
    return sum(float(row["clients"] * (row["floats_up"] + row["floats_down"])) for row in record.metrics)


def _reaches(record: Record, baseline: Entry | None) -> float | None:
    """The round in which a run reaches the best accuracy of the baseline's run of the same seed; None if never."""
    same = [r for r in (baseline.records if baseline else []) if r.experiment.seed == record.experiment.seed]
    best = same[0].best() if same else None
    return round_reaching(record.points(record.lead), best[1]) if best else None


# ---- ranks over all settings and seeds ----


@dataclass(frozen=True)
class Ranking:
    """Mean ranks over blocks (a setting and a seed), with Friedman's and Nemenyi's tests.

    Attributes:
        ranks: Mean rank by method, best first; 1 is best, ties share their mean.
        blocks: Number of blocks.
        difference: Nemenyi's critical difference at 5 %: methods whose ranks differ by less are not told apart.
        groups: Largest groups of methods that are not told apart, as first and last place.
        left_out: Methods without a result in every block.
    """

    ranks: Mapping[str, float]
    blocks: int
    difference: float
    groups: Sequence[tuple[int, int]]
    left_out: Sequence[str]

    def near(self, method: str) -> list[str]:
        """The other methods that are not told apart from one, best first."""
        own = self.ranks[method]
        return [name for name, rank in self.ranks.items() if name != method and abs(rank - own) < self.difference]


def ranking(entries: Sequence[Entry]) -> Ranking:
    """Rank the methods that have a result for every setting and seed."""
    scores: dict[str, dict[tuple[str, int], float]] = {}
    for entry in entries:
        own = scores.setdefault(entry.method, {})
        own |= {(entry.setting, seed): value for seed, value in _accuracies(entry).items()}
    blocks = sorted({block for own in scores.values() for block in own})
    complete = [method for method, own in scores.items() if len(own) == len(blocks) and blocks]
    table = np.array([[scores[method][block] for method in complete] for block in blocks]).reshape(len(blocks), -1)
    means = mean_ranks(table) if complete else np.empty(0)
    order = sorted(range(len(complete)), key=lambda place: means[place])
    ranks = {complete[place]: float(means[place]) for place in order}
    gap = critical_difference(len(complete), len(blocks)) if len(complete) > 1 else math.inf
    left_out = [method for method in scores if method not in complete]
    return Ranking(ranks, len(blocks), gap, cliques(list(ranks.values()), gap), left_out)


def mean_ranks(table: np.ndarray) -> np.ndarray:
    """Mean rank of every column over the rows; the highest value has rank 1, ties share their mean.

    >>> mean_ranks(np.array([[0.9, 0.8, 0.8], [0.5, 0.7, 0.6]])).tolist()
    [2.0, 1.75, 2.25]
    """
    above = (table[:, None, :] > table[:, :, None]).sum(2)
    equal = (table[:, None, :] == table[:, :, None]).sum(2)
    means: np.ndarray = (above + (equal + 1) / 2).mean(0)
    return means


def critical_difference(methods: int, blocks: int, level: float = 0.05) -> float:
    """Nemenyi's critical difference of mean ranks: q √(k (k + 1) / (6 N)), as in Demšar (2006).

    >>> round(critical_difference(4, 14), 2)  # the example of that paper's table 6 has k = 4 and N = 14
    1.25
    """
    return studentized_range(methods, level) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * blocks))


def studentized_range(count: int, level: float) -> float:
    """The quantile 1 − level of the range of `count` standard normal numbers.

    >>> round(studentized_range(3, 0.05), 2)
    3.31
    """
    x = np.linspace(-8, 8, 4001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        shifted = np.interp(x + middle, x, below, right=1.0)
        inside = count * np.trapezoid(density * (shifted - below) ** (count - 1), x)
        low, high = (middle, high) if inside < 1 - level else (low, middle)
    return (low + high) / 2


def cliques(ranks: Sequence[float], gap: float) -> list[tuple[int, int]]:
    """The longest runs of sorted ranks whose ends differ by less than `gap`, as places; single ones are left out.

    >>> cliques([1.0, 1.5, 3.0, 3.2], 1.6)
    [(0, 1), (1, 2), (2, 3)]
    """
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = first + sum(1 for other in ranks[first + 1 :] if other - rank < gap)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found
