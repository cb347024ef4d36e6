"""Pictures of the loss around models: surfaces, planes through three of them, lines between two."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from fedflat.report.page.flatness import lines, pairs
from fedflat.report.page.markup import Html, Section
from fedflat.report.page.page import Page, beside, legend, read_analysis
from fedflat.runs.records import Record

STEEP = 10  # a surface is cut at so many times the median loss: what lies above is not where anybody trains
TURN = "Drag it, or focus it and use the arrow keys, to turn it"
Item = dict[str, Any]


def surface(page: Page) -> Section | None:
    """Loss over two random directions around each model."""
    how = (
        "Loss in two random directions around each model, all on one scale: a wide, shallow bowl, with contour lines "
        f"far apart, is a flat minimum. {TURN}; all turn together."
    )
    return _section(page, "landscape", "The loss around each model", how, "Surface")


def eigenplane(page: Page) -> Section | None:
    """Loss over the two sharpest directions."""
    how = (
        "The same in the two sharpest directions of each model, where the loss rises fastest: how narrow the valley "
        "is at its narrowest."
    )
    return _section(page, "eigenplane", "The two sharpest directions", how, "Sharpest")


def _section(page: Page, name: str, title: str, how: str, menu: str) -> Section | None:
    items = [group.series(**item) for group in page.groups if (item := _first(name, group.records))]
    return Section(name, title, how, [_drawn(page, title, items)], menu) if items else None


def _drawn(page: Page, title: str, items: Sequence[Item]) -> Html:
    values = [z for item in items for row in item["z"] for z in row if z is not None]
    low, high = min(values), min(max(values), STEEP * median(values))
    cut = high < max(values) or any(z is None for item in items for row in item["z"] for z in row)
    return page.draw("surface", title, {"items": list(items), "low": low, "high": high, "cut": cut}, titled=False)


def _first(name: str, records: Sequence[Record]) -> Item | None:
    """The analysis of the first seed that has it."""
    found = ((record, read_analysis(record, name, _item)) for record in records)
    return next((item | {"note": f"seed {record.experiment.seed}"} for record, item in found if item), None)


def _item(values: dict[str, Any]) -> Item:
    """Two axes and a loss for every pair of coordinates, and the models that lie in the picture."""
    x, y = ([float(place) for place in axis] for axis in values["axes"])
    z = [[None if loss is None else float(loss) for loss in row] for row in values["loss"]]
    if [len(row) for row in z] != [len(y)] * len(x):
        raise ValueError("the loss does not fit the axes")
    marks = [{"name": str(name), "x": float(a), "y": float(b)} for name, (a, b) in values["marks"].items()]
    return {"x": x, "y": y, "z": z, "marks": marks, "runs": list(map(str, values.get("runs", [])))}


def plane(page: Page) -> Section | None:
    """The planes through three runs' models."""
    found = [(record, item) for record in page.records if (item := read_analysis(record, "plane", _item))]
    if not found:
        return None
    for place, (_, item) in enumerate(found):
        item |= {"key": f"plane{place}", "name": "", "place": None, "note": ""}
        for mark, name in zip(item["marks"], _called(page, item["runs"]), strict=False):
            mark["name"] = name
    title = "Three models in one plane"
    how = (
        "The plane through three trained models, each marked: if no ridge lies between two of them, they share a "
        f"valley. {TURN}."
    )
    drawn = [_drawn(page, title, [item]) for _, item in found]
    return Section("plane", title, how, drawn, "Plane")


def _called(page: Page, runs: Sequence[str]) -> list[str]:
    """What runs, given by the names of their folders, are called on this page."""
    labels = {
        record.path.name: group.label if len(group.records) == 1 else f"{group.label}, seed {record.experiment.seed}"
        for group in page.groups
        for record in group.records
        if record.path
    }
    return [labels.get(run, run) for run in runs]


def line(page: Page) -> Section | None:
    """Loss along one random direction."""
    plots = []
    for key, title in (("loss", "Loss on the training data"), ("test_loss", "Loss on the test data")):
        series = lines(page, "line", lambda v, key=key: pairs(v["axes"][0], v[key] or v["loss"]))  # type: ignore[misc]
        plots += [page.lines(title, series, {"label": "step along the direction"}, {})] if series else []
    how = "One random direction through each model, which sits at 0; a curve that opens wider is a flatter minimum."
    body = [page.legend(), beside(*plots)]
    return Section("line", "Along one direction", how, body, "Line") if plots else None


def interpolation(page: Page) -> Section | None:
    """Loss on the lines between two runs' models."""
    plots = []
    for record in page.records:
        found = read_analysis(record, "interpolation", lambda v: v)
        if found:
            names = _called(page, list(map(str, found.get("runs", [])))) or ["model 1", "model 2"]
            series = read_analysis(record, "interpolation", _sides) or []
            marks = [{"x": place, "name": name} for place, name in zip((0, 1), names, strict=False)]
            plots.append(page.lines(" to ".join(names), series, {"label": "share of the way"}, {}, marks=marks))
    how = "The straight line from one model to the other: a hump between them is a barrier that separates two valleys."
    sides = legend([("train", "training data", 0), ("test", "test data", 1)])
    body = [sides, beside(*plots)]
    return Section("interpolation", "Between two models", how, body, "Between") if plots else None


def _sides(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Training and test loss along the way."""
    sides = (("train", "training data", "loss"), ("test", "test data", "test_loss"))
    found = [
        (key, name, place, pairs(values["axes"][0], values[loss]))
        for place, (key, name, loss) in enumerate(sides)
        if values[loss] is not None
    ]
    return [
        {"key": key, "name": name, "place": place, "x": [x for x, _ in points], "y": [y for _, y in points]}
        for key, name, place, points in found
    ]
