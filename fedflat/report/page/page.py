"""What the sections share: the runs in groups, the plots drawn so far, the analyses that were stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fedflat.core.curves import written
from fedflat.errors import CheckpointError
from fedflat.report.compare import compare
from fedflat.report.comparison import Comparison
from fedflat.report.figures import LONG, SMOOTH
from fedflat.report.page.markup import Html, breakable, tag
from fedflat.report.page.run_groups import Group, Series
from fedflat.runs.records import Record, first_measured, grouped, lead_of
from fedflat.words import number, percent

T = TypeVar("T")
Axis = dict[str, Any]
SHORT = 8  # a curve of fewer values is not worth smoothing
CLIENTS = {"personal_mean": "the clients’ own models", "clients_mean": "the clients on their own test data"}
NOT_FINITE = ("inf", "-inf", "nan")  # as an analysis writes them


@dataclass
class Page:
    """A report in the making. plots: what the scripts will draw, by number."""

    records: Sequence[Record]
    plots: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def groups(self) -> list[Group]:
        """The runs, those that differ in nothing but the seed together."""
        return [Group(place, label, runs) for place, (label, runs) in enumerate(grouped(self.records).items())]

    @cached_property
    def metric(self) -> str:
        """What runs are judged by: the leading metric of the common model, or the clients' own where there is none."""
        return first_measured(self.records, lead_of(self.records), *CLIENTS)

    @property
    def falls(self) -> bool:
        """Whether less of that metric is better."""
        return self.records[0].falls(self.metric)

    @property
    def form(self) -> str:
        """How values of that metric are written: "percent" or "number"."""
        return "percent" if self.records[0].is_share(self.metric) else "number"

    @property
    def what(self) -> str:
        """What that metric is called in a sentence."""
        lead = written(lead_of(self.records))
        return f"mean {lead} of {CLIENTS[self.metric]}" if self.metric in CLIENTS else lead

    def shown(self, value: float | None) -> str:
        """A value of that metric as text."""
        return percent(value) if self.form == "percent" else number(value)

    @cached_property
    def comparison(self) -> Comparison:
        """One row per group."""
        return self.compared()

    def compared(self, targets: Sequence[float] = ()) -> Comparison:
        """One row per group, with the rounds to targets."""
        return compare(self.records, metric=self.metric, targets=targets)

    def lines(self, label: str, series: Sequence[Series], x: Axis, y: Axis, **more: Any) -> Html:
        """Curves over two axes: {"label": …, "form": "number", "percent" or "amount", "log": …}."""
        return self.draw("lines", label, {"series": series, "x": x, "y": y, **more})

    def over_rounds(self, label: str, series: Sequence[Series], y: Axis) -> Html:
        """Curves over the rounds, which a reader can smooth; long ones are smoothed a little from the start."""
        longest = max((len(one["x"]) for one in series), default=0)
        smooth = {} if longest < SHORT else {"smooth": SMOOTH if longest >= LONG else 0.0}
        return self.lines(label, series, {"label": "round"}, y, **smooth)

    def second_half(self, number: int) -> Html:
        """A plot over the rounds once more, from the middle on, where curves that look alike part."""
        first = self.plots[number]
        middle = max(x for one in first["series"] for x in one["x"]) / 2
        again = {name: value for name, value in first.items() if name not in ("kind", "label", "series")}
        again |= {"same": number, "x": first["x"] | {"from": middle}, "y": dict(first["y"])}
        return self.draw("lines", f"{first['label']}, second half of the rounds", again)

    def draw(self, kind: str, label: str, values: dict[str, Any], titled: bool = True) -> Html:
        """The place for a plot that the page's scripts draw. label: its title, also for those who cannot see it.

        titled: whether to show the title; not where the section's own says the same.
        """
        self.plots.append({"kind": kind, "label": label, **values})
        place = tag("div", class_="plot", data_plot=str(len(self.plots) - 1))
        return tag("figure", tag("figcaption", label) if titled else "", place)

    def legend(self, groups: Iterable[Group] | None = None) -> Html:
        """Buttons that hide and show a group in every plot."""
        shown = self.groups if groups is None else groups
        return legend([(group.key, group.label, group.place) for group in shown])

    def analyses(self, name: str, read: Callable[[dict[str, Any]], T]) -> list[tuple[Group, list[T]]]:
        """What `read` makes of the stored analyses of this name, for the groups that have any."""
        found = [(group, [read_analysis(r, name, read) for r in group.records]) for group in self.groups]
        kept = [(group, [one for one in results if one is not None]) for group, results in found]
        return [(group, results) for group, results in kept if results]


def read_analysis(record: Record, name: str, read: Callable[[dict[str, Any]], T]) -> T | None:
    """What `read` makes of an analysis in a run folder; None where there is none. Numbers not finite are None."""
    path = record.path / "analysis" / f"{name}.json" if record.path else Path()
    if not path.is_file():
        return None
    try:
        return read(_numbers(json.loads(path.read_text())))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not what `fedflat analyze` writes ({type(error).__name__}: {error}); make it anew or delete it"
        ) from None


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return None if value in NOT_FINITE else value


def training_loss(values: dict[str, Any]) -> float | None:
    """The model's mean loss on the training samples on which an analysis looked at it."""
    loss = values.get("conditions", {}).get("loss")
    return None if loss is None else float(loss)


def client_name(record: Record, client: int) -> str:
    """What a run calls a client: its name where it has one, else its number."""
    names = record.details.get("names") or []
    return str(names[client]) if client < len(names) else str(client)


def swatch(place: int) -> Html:
    """A short piece of the line that stands for the n-th group."""
    line = tag("line", x1="1", y1="6", x2="25", y2="6", class_=f"line c{place % 7} d{place % 4}")
    return tag("svg", line, class_="swatch", viewBox="0 0 26 12", aria_hidden="true")


def named(group: Group) -> Html:
    """A group's name behind its colour."""
    return tag("span", swatch(group.place), tag("span", breakable(group.label)), class_="named")


def legend(entries: Sequence[tuple[str, str, int]]) -> Html:
    """Buttons that hide and show what bears these keys: (key, name, place)."""
    buttons = [
        tag("button", swatch(place), tag("span", name), type="button", data_key=key, aria_pressed="true")
        for key, name, place in entries
    ]
    return tag("div", *buttons, class_="legend", role="group", aria_label="Lines shown")


def beside(*plots: str) -> Html:
    """Plots next to each other where there is room."""
    return tag("div", *plots, class_="beside")
