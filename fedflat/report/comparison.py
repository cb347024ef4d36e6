"""`Comparison`: rows of figures, and the tables that people read or paste."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from fedflat.report import tabular
from fedflat.report.terminal import plain_table, score
from fedflat.report.words import MISSING, amount, clock

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
GAP, NAME = 3, 28  # characters between columns, and of a name before it is broken, where there is little room
MANY = 6  # runs of which not every one is shown


@dataclass(frozen=True, repr=False)
class Comparison:
    """Groups of runs beside each other: one dict a group in `rows`, and tables of them as text.

    runs: what the group is called. seeds, rounds: seed and rounds done of each run. unfinished: how many are.
    last, best, tail: mean over the runs of the metric's last and best value, and of its average over the last tenth of
    the rounds; last_std and so on: their sample standard deviations, None for a single run.
    p, test: two-sided p-value of the tail averages against the first row's, and the test; why there is none, if so.
    better: whether the mean of the tail averages is better than the first row's.
    to_0.5, to_0.5_runs: the first round at which the mean curve, and each run, reaches 0.5; None where they never do.
    low5: accuracy of the lowest 5 % of the clients, each on its own test data.
    floats_up, floats_down, steps, seconds: what a run cost in total, on average.
    """

    rows: list[Row]
    metric: str = "accuracy"
    targets: tuple[float, ...] = ()
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table for GitHub's Markdown."""
        return tabular.markdown(*self._filled(), self.notes)

    def latex(self) -> str:
        r"""The table for LaTeX with `\usepackage{booktabs}`."""
        return tabular.latex(*self._filled(), self.notes)

    def csv(self) -> str:
        """The rows as comma-separated values, every number with all its digits."""
        return tabular.csv_text(self.rows)

    def tables(self, width: int) -> list[Table]:
        """Tables for a terminal, as many below each other as it takes to stay within `width` characters."""
        heads, rows = self._filled()
        sizes = [max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True)]
        parts = _packed([len(section) for section in self._sections()], sizes[1:], width - min(sizes[0], NAME))
        return [_table([[line[place] for place in (0, *part)] for line in (heads, *rows)]) for part in parts]

    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        out = Console(file=text, width=100, color_system=None, highlight=False)
        out.print(*self.tables(out.width), *self.notes, sep="\n", markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        return tabular.in_html(*self._filled(), self.notes)

    def _filled(self) -> tuple[list[str], list[list[str]]]:
        """Heads and cells, with the names of the rows in front."""
        columns = [column for section in self._sections() for column in section]
        heads = [self.metric, *(head for head, _ in columns)]
        return heads, [[_name(row), *(text(row) for _, text in columns)] for row in self.rows]

    def _sections(self) -> list[list[Column]]:
        """What was reached, how soon and for whom, and at what cost."""
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
    """Columns, counted from 1, by table: sections of so many columns stay together where they fit in one table."""
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
    """The p-value; that a row is better or worse is only said where chance would seldom have it so."""
    p = row["p"]
    if p is None:
        return row["test"] or MISSING
    verdict = (" better" if row["better"] else " worse") if p < 0.05 else ""
    return ("<0.001" if p < 0.001 else f"{p:.3f}") + verdict


def _reached(target: float, row: Row) -> str:
    return "".join(reached(target, row))


def reached(target: float, row: Row) -> tuple[str, str]:
    """The round of the mean curve; in brackets those of several runs, or least and most of many. T+: not within T."""
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
