"""`pivot`: methods × settings, the best of every setting marked; ranks and the critical difference over settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedflat.console import plain_table
from fedflat.core.curves import written
from fedflat.errors import InputError
from fedflat.extras import blank_figure, save_figure
from fedflat.report import tabular
from fedflat.report.terminal import score
from fedflat.runs.records import Record, RunLike, check_metric, differing, lead_of, records_of
from fedflat.words import MISSING

if TYPE_CHECKING:
    from rich.table import Table

NEMENYI = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""Critical values q for a level of 0.05 by the number of methods (Demšar, JMLR 2006, table 5)."""


@dataclass(frozen=True, repr=False)
class Pivot:
    """Tail averages of a metric, by method (rows) and setting (columns).

    Attributes:
        cells: {(method, setting): values of the seeds}.
        less: Whether less is better.
    """

    methods: tuple[str, ...]
    settings: tuple[str, ...]
    cells: dict[tuple[str, str], list[float]]
    metric: str
    less: bool

    def mean(self, method: str, setting: str) -> float | None:
        """The mean over the seeds."""
        values = self.cells.get((method, setting))
        return fmean(values) if values else None

    def best(self, setting: str) -> str | None:
        """The method with the best mean in a setting."""
        found = {method: value for method in self.methods if (value := self.mean(method, setting)) is not None}
        return (min if self.less else max)(found, key=lambda method: found[method]) if found else None

    def ranks(self) -> dict[str, float]:
        """Mean rank of every method over the settings that all methods have; 1 is best, ties share their ranks."""
        whole = [s for s in self.settings if all(self.mean(m, s) is not None for m in self.methods)]
        sums = dict.fromkeys(self.methods, 0.0)
        for setting in whole:
            values = {m: (1 if self.less else -1) * float(self.mean(m, setting) or 0.0) for m in self.methods}
            for method, value in values.items():
                below = sum(other < value for other in values.values())
                equal = sum(other == value for other in values.values())
                sums[method] += below + (equal + 1) / 2
        return {method: total / len(whole) for method, total in sums.items()} if whole else {}

    def critical_difference(self) -> float | None:
        """Nemenyi's: two methods whose mean ranks differ by less cannot be told apart at a level of 0.05."""
        count, settings = len(self.methods), len(self.ranks() and self.settings)
        if count not in NEMENYI or settings < 2:
            return None
        return NEMENYI[count] * math.sqrt(count * (count + 1) / (6 * settings))

    @property
    def notes(self) -> list[str]:
        """Explanations of the table, one sentence each."""
        what = "lowest" if self.less else "highest"
        spread = "tail averages: mean ± sample standard deviation over seeds"
        lines = [f"{written(self.metric)}, {spread}; *: the {what} mean."]
        difference = self.critical_difference()
        if difference is not None:
            lines.append(
                f"rank: mean over the settings, 1 is best; ranks that differ by less than {difference:.2f} cannot be "
                "told apart (Nemenyi, 0.05)."
            )
        return lines

    def filled(self) -> tuple[list[str], list[list[str]]]:
        """Heads and cells as text, the best method by rank first."""
        ranks = self.ranks()
        ordered = sorted(self.methods, key=lambda method: ranks.get(method, 0.0))
        best = {setting: self.best(setting) for setting in self.settings}
        rows = [
            [m, *(self._text(m, s, best[s] == m) for s in self.settings), *([f"{ranks[m]:.2f}"] if ranks else [])]
            for m in ordered
        ]
        return [self.metric, *self.settings, *(["rank"] if ranks else [])], rows

    def _text(self, method: str, setting: str, best: bool) -> str:
        values = self.cells.get((method, setting))
        if not values:
            return MISSING
        spread = f" ± {score(stdev(values))}" if len(values) > 1 else ""
        return score(fmean(values)) + spread + (" *" if best and len(self.methods) > 1 else "")

    def markdown(self) -> str:
        """The table as GitHub Markdown."""
        return tabular.markdown(*self.filled(), self.notes)

    def latex(self) -> str:
        r"""The table for LaTeX with `\usepackage{booktabs}`."""
        return tabular.latex(*self.filled(), self.notes)

    def csv(self) -> str:
        """One line per method, setting and seed, with all digits."""
        rows = [{"method": m, "setting": s, self.metric: v} for (m, s), values in self.cells.items() for v in values]
        return tabular.csv_text(rows)

    def tables(self, width: int) -> list[Table]:
        """The table for a terminal."""
        heads, rows = self.filled()
        return [plain_table(heads, rows, numbers=range(1, len(heads)))]

    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        out = Console(file=text, width=120, color_system=None, highlight=False, force_jupyter=False)
        out.print(*self.tables(120), *self.notes, sep="\n", markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        return tabular.in_html(*self.filled(), self.notes)

    def plot(self, path: str | Path) -> Path:
        """Draw the critical-difference diagram: mean ranks, and bars over methods that cannot be told apart."""
        ranks, difference = self.ranks(), self.critical_difference()
        if not ranks or difference is None:
            raise InputError(
                "a critical difference needs 2 to 10 methods that all ran in the same two or more settings"
            )
        ordered = sorted(ranks, key=lambda method: ranks[method])
        figure = blank_figure(8, 1.4 + 0.28 * len(ordered))
        axes = figure.add_subplot()
        axes.set_xlim(0.8, len(ordered) + 0.2)
        axes.set_ylim(-len(ordered) - 1, 1.5)
        axes.spines[["left", "right", "bottom"]].set_visible(False)
        axes.xaxis.tick_top()
        axes.set_yticks([])
        axes.set_title(
            f"mean rank over {len(self.settings)} settings; critical difference {difference:.2f}", fontsize=10
        )
        for place, method in enumerate(ordered, start=1):
            axes.plot([ranks[method]] * 2, [1.5, -place], color="#0072b2", lw=1)
            left = ranks[method] > (1 + len(ordered)) / 2  # where a name to the right might not fit
            gap, side = (-0.04, "right") if left else (0.04, "left")
            name = f"{method}  {ranks[method]:.2f}"
            axes.text(ranks[method] + gap, -place, name, va="center", ha=side, fontsize=9)
        for level, (low, high) in enumerate(alike(ranks, difference)):
            axes.plot([low - 0.03, high + 0.03], [0.9 - 0.5 * level] * 2, color="#1f2933", lw=3)
        return save_figure(figure, path)


def alike(ranks: dict[str, float], difference: float) -> list[tuple[float, float]]:
    """The longest ranges of ranks whose ends differ by less than the critical difference.

    >>> alike({"a": 1.0, "b": 1.5, "c": 3.0}, 1.0)
    [(1.0, 1.5)]
    """
    values = sorted(ranks.values())
    spans = {(low, max(high for high in values if high - low < difference)) for low in values}
    whole = [s for s in spans if s[0] < s[1] and not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in spans)]
    return sorted(whole)


def pivot(
    runs: str | Path | Iterable[RunLike | Record | str | Path], columns: Sequence[str], metric: str = ""
) -> Pivot:
    """Methods × settings.

    Args:
        runs: See `compare`.
        columns: Fields whose values make the columns, such as ["partition"].
        metric: What to compare instead of the leading metric.
    """
    records = records_of(runs)
    if not records:
        raise InputError("there are no runs to compare: give runs or run folders")
    metric = metric or lead_of(records)
    check_metric(metric, records)
    left = [name for name in differing(records) if name not in ("method", "seed", *columns)]
    cells: dict[tuple[str, str], list[float]] = {}
    for record in records:
        e: dict[str, Any] = record.experiment.to_dict()
        setting = ", ".join(str(e[name]) for name in columns)
        row = ", ".join([str(e["method"]), *(f"{name}={e[name]}" for name in left)])
        if (value := record.tail(metric)) is not None:
            cells.setdefault((row, setting), []).append(value)
    methods, settings = (tuple(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    return Pivot(methods, settings, cells, metric, records[0].falls(metric))
