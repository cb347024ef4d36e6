"""Numbers for the plots: runs that differ by seed as one curve with a spread, smoothed and thinned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedflat.runs.records import Record

POINTS = 600  # of a curve at most: more cannot be told apart on a screen, even when zoomed
DIGITS = 5  # significant ones in a plot
Points = Sequence[tuple[float, float]]
Series = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed. place: their number among the groups, which gives their colour."""

    place: int
    label: str
    records: Sequence[Record]

    @property
    def key(self) -> str:
        """By what the page's scripts tell it from others."""
        return f"g{self.place}"

    def series(self, **values: Any) -> Series:
        """Something to draw in the colour of the group, under its name."""
        return {"key": self.key, "name": self.label, "place": self.place, **values}

    def curve(self, name: str) -> Series | None:
        """A metric over the rounds, None where there is none."""
        found = spread([record.points(name) for record in self.records])
        return self.series(**thinned(found)) if found else None


def spread(curves: Sequence[Points]) -> dict[str, list[float]]:
    """Mean, least and most of several curves where all of them have a value; of a single one the values only.

    Of curves that nowhere meet, the first stands for all.

    >>> spread([[(1, 2.0), (2, 4.0)], [(1, 4.0)]])
    {'x': [1], 'y': [3.0], 'low': [2.0], 'high': [4.0]}
    """
    tables = [dict(curve) for curve in curves if curve]
    if not tables:
        return {}
    common = sorted(set(tables[0]).intersection(*tables[1:]))
    if not common:
        return spread([list(tables[0].items())])
    columns = [[each[x] for each in tables] for x in common]
    found: dict[str, list[float]] = {"x": common, "y": [fmean(column) for column in columns]}
    if len(tables) > 1:
        found |= {"low": [min(column) for column in columns], "high": [max(column) for column in columns]}
    return found


def thinned(series: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """At most `POINTS` places of lists of equal length, evenly spaced, the first and the last among them."""
    count = len(series["x"])
    step = max(1, math.ceil((count - 1) / (POINTS - 1)))
    places = [*range(0, count - 1, step), count - 1]
    return {name: [values[place] for place in places] for name, values in series.items()}


def rounded(value: Any) -> Any:
    """Plain values with numbers cut to the digits that a plot can show; JSON has no word for those not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, (list, tuple)) else value
