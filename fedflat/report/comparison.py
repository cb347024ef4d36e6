"""`Comparison`: the rows of a comparison, and tables of them as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from fedflat.console import plain_table
from fedflat.report import tabular
from fedflat.report.terminal import score
from fedflat.words import MISSING, amount, clock

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
GAP, NAME = 3, 28  # characters between columns; length at which a name wraps in a narrow terminal
MANY = 6  # with more runs than this, only the first and the last are shown


@dataclass(frozen=True, repr=False)
class Comparison:
    """Groups of runs in `rows`, one dict per group, and tables of them as text.

    The keys of a row:
        runs: Name of the group.
        seeds, rounds: Seed of each run, and its number of rounds done.
        unfinished: Number of unfinished runs.
        last, best, tail: Mean over the runs of the metric's last value, best value, and average over the last tenth
            of the rounds. last_std, best_std, tail_std: their sample standard deviations, None for a single run.
        p, test: Two-sided p-value of the tail averages against the first row's, and the name of the test; without a
            test, p is None and `test` says why.
        better: Whether the mean of the tail averages is better than the first row's.
        to_0.5, to_0.5_runs: The first round in which the mean curve, and each run, reaches 0.5; None if never.
        low5: Mean accuracy of the worst 5 % of the clients, each on its own test data.
        floats_up, floats_down, steps, seconds: Total cost of a run, mean over the runs.
    """

    rows: list[Row]
    metric: str = "accuracy"
    targets: tuple[float, ...] = ()
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as GitHub Markdown."""
        return tabular.markdown(*self._filled(), self.notes)

    def latex(self) -> str:
        r"""The table for LaTeX with `\usepackage{booktabs}`."""
        return tabular.latex(*self._filled(), self.notes)

    def csv(self) -> str:
        """The rows as comma-separated values, with all digits of every number."""
        return tabular.csv_text(self.rows)

    def tables(self, width: int) -> list[Table]:
        """Tables for a terminal, as few as possible, each at most `width` characters wide."""
        heads, rows = self._filled()
        sizes = [max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True)]
        parts = _packed([len(section) for section in self._sections()], sizes[1:], width - min(sizes[0], NAME))
        return [_table([[line[place] for place in (0, *part)] for line in (heads, *rows)]) for part in parts]

    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        out = Console(file=text, width=100, color_system=None, highlight=False, force_jupyter=False)
        out.print(*self.tables(out.width), *self.notes, sep="\n", markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        return tabular.in_html(*self._filled(), self.notes)

    def _filled(self) -> tuple[list[str], list[list[str]]]:
        """Heads and cells, including the names of the rows."""
        columns = [column for section in self._sections() for column in section]
        heads = [self.metric, *(head for head, _ in columns)]
        return heads, [[_name(row), *(text(row) for _, text in columns)] for row in self.rows]

    def _sections(self) -> list[list[Column]]:
        """The columns in three sections: results, rounds to targets and worst clients, costs."""
        reached: list[Column] = [(name, partial(_spread, name)) for name in ("last", "best", "tail")]
        tested: list[Column] = [("p", _chance)] if len(self.rows) > 1 else []
        soon: list[Column] = [(f"to {target:g}", partial(_reached, target)) for target in self.targets]
        low: list[Column] = [("lowest 5 %", partial(_spread, "low5"))]
        sums = {"up": "floats_up", "down": "floats_down", "steps": "steps"}
        costs: list[Column] = [(head, partial(_cost, name)) for head, name in sums.items()]
        known = any(row["low5"] is not None for row in self.rows)
        return [
            [("seeds", _seeds), *reached, *tested],
            [*soon, *(low if known else [])],
            [*costs, ("time", lambda row: clock(row["seconds"]))],
        ]


def _packed(sections: Sequence[int], sizes: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table, counted from 1. The columns of a section stay together if they fit in one table."""
    parts, room, place = list[list[int]](), 0, 0
    for count in sections:
        whole = sum(sizes[place : place + count])
        for size in sizes[place : place + count]:
            place += 1
            if max(size, whole) > room:
                parts.append([])
                room = width
            parts[-1].append(place)
            room, whole = room - size, 0
    return parts


def _table(lines: Sequence[Sequence[str]]) -> Table:
    return plain_table(lines[0], lines[1:], numbers=range(1, len(lines[0])))


def _name(row: Row) -> str:
    runs = len(row["seeds"])
    which = "unfinished" if runs == 1 else f"{row['unfinished']} of {runs} unfinished"
    return f"{row['runs']} ({which})" if row["unfinished"] else str(row["runs"])


def _seeds(row: Row) -> str:
    seeds, runs = len(set(row["seeds"])), len(row["seeds"])
    return str(seeds) if seeds == runs else f"{seeds} ({runs} runs)"


def _spread(name: str, row: Row) -> str:
    deviation = row[f"{name}_std"]
    return score(row[name]) + (f" ± {score(deviation)}" if deviation is not None else "")


def _chance(row: Row) -> str:
    """The p-value, with "better" or "worse" if it is below 0.05."""
    p = row["p"]
    if p is None:
        return row["test"] or MISSING
    verdict = (" better" if row["better"] else " worse") if p < 0.05 else ""
    return ("<0.001" if p < 0.001 else f"{p:.3f}") + verdict


def _reached(target: float, row: Row) -> str:
    return "".join(reached(target, row))


def reached(target: float, row: Row) -> tuple[str, str]:
    """The round of the mean curve, and in brackets those of the runs, of many only the first and the last.

    "T+" means not within T rounds.
    """
    if row["last"] is None:
        return MISSING, ""
    name = f"to_{target:g}"
    pairs = list(zip(row[f"{name}_runs"], row["rounds"], strict=True))
    if len(pairs) > MANY:
        pairs.sort(key=lambda pair: pair[0] or math.inf)
    mean, *each = (str(round or f"{rounds}+") for round, rounds in [(row[name], min(row["rounds"])), *pairs])
    each[1:-1] = ["…"] if len(pairs) > MANY else each[1:-1]
    return mean, f" ({', '.join(each)})" if len(each) > 1 else ""


def _cost(name: str, row: Row) -> str:
    return amount(row[name])
