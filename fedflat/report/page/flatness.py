"""How flat the minima are: eigenvalues of the Hessian, their density, layer by layer, and noise on the weights."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np

from fedflat.report.page.markup import Html, Section, table, tag
from fedflat.report.page.page import Page, beside, named, training_loss
from fedflat.report.page.run_groups import Group, Points, Series, spread, thinned
from fedflat.report.page.training import bar
from fedflat.words import with_spread

LOSS = "training loss"
GRID, BLUR, FLOOR = 240, 0.02, 1e-5  # points of a density, width of its Gaussians over the range, least value drawn


def pairs(xs: list[Any], ys: list[Any]) -> Points:
    """Points where both coordinates are numbers."""
    both = zip(xs, ys, strict=True)
    return [(float(x), float(y)) for x, y in both if x is not None and y is not None]


def lines(page: Page, name: str, read: Callable[[dict[str, Any]], Points]) -> list[Series]:
    """An analysis as one curve per group: mean over the seeds, with their range."""
    found = [(group, spread(curves)) for group, curves in page.analyses(name, read)]
    return [group.series(**thinned(curve)) for group, curve in found if curve]


def flatness(page: Page) -> Section | None:
    """Extreme eigenvalues and trace as a table, the largest eigenvalues and the density as curves."""
    body = [part for part in (_extremes(page), _spectra(page)) if part]
    how = (
        "The eigenvalues of the loss’s Hessian tell how the loss bends around a model: the smaller λ max and trace, "
        "the flatter the minimum. By itself a small λ max does not tell which model generalises better: there are "
        "methods that raise both accuracy and λ max. Compare models of about the same training loss, and look at λ min."
    )
    return Section("flatness", "How flat is the minimum?", how, body, "Flatness") if body else None


def _extremes(page: Page) -> Html | None:
    found = page.analyses("curvature", _measures) or page.analyses("density", _measures)
    if not found:
        return None
    known = {head for _, runs in found for run in runs for head in run}
    heads = [head for head in (LOSS, "λ max", "trace", "λ₁ / λ₅", "λ min") if head in known]
    columns = [[[run[head] for run in runs if head in run] for _, runs in found] for head in heads]
    most = [max((fmean(values) for values in column if values), default=0.0) for column in columns]
    rows = [
        [named(group), *(_cell(column[row], top, group.place) for column, top in zip(columns, most, strict=True))]
        for row, (group, _) in enumerate(found)
    ]
    return table(["method", *heads], rows, "Curvature at the end of training", look="barred")


def _measures(values: dict[str, Any]) -> dict[str, float]:
    """The figures that this analysis has."""
    eigenvalues = [float(value) for value in values["eigenvalues"]]
    found = {"λ max": eigenvalues[0], "λ min": float(values["smallest"])}
    found |= {"trace": float(values["trace"])} if values["trace"] is not None else {}
    found |= {} if (loss := training_loss(values)) is None else {LOSS: loss}
    return found | ({"λ₁ / λ₅": eigenvalues[0] / eigenvalues[4]} if len(eigenvalues) > 4 and eigenvalues[4] else {})


def _cell(values: list[float], most: float, place: int) -> Html:
    share = max(0.0, fmean(values)) / most if values and most > 0 else 0.0
    return tag("span", with_spread(values), bar(share, place) if share else "")


def _spectra(page: Page) -> Html | None:
    ranks = lines(page, "spectrum", lambda v: pairs([*range(1, 1 + len(v["eigenvalues"]))], v["eigenvalues"]))
    density = _densities(page)
    drawn = []
    if ranks:
        drawn.append(page.lines("Largest eigenvalues", ranks, {"label": "rank"}, {"log": True}))
    if density:
        drawn.append(page.lines("Density of the eigenvalues", density, {"label": "λ"}, {"log": True, "least": FLOOR}))
    return tag("div", page.legend(), beside(*drawn)) if drawn else None


def _densities(page: Page) -> list[Series]:
    """Densities of all groups on one grid, smoothed alike."""
    found = page.analyses("density", lambda v: (np.array(v["density"]["nodes"]), np.array(v["density"]["weights"])))
    every = [nodes for _, runs in found for nodes, _ in runs]
    if not every:
        return []
    low, high = min(n.min() for n in every), max(n.max() for n in every)
    grid = np.linspace(low, high, GRID)
    return [_density(group, runs, grid) for group, runs in found]


def _density(group: Group, runs: list[tuple[np.ndarray, np.ndarray]], grid: np.ndarray) -> Series:
    width = BLUR * (grid[-1] - grid[0]) or 1.0
    curves = []
    for nodes, weights in runs:
        bells = np.exp(-(((grid[:, None] - nodes.ravel()) / width) ** 2) / 2) / (width * np.sqrt(2 * np.pi))
        curves.append(pairs(grid.tolist(), (bells @ weights.ravel() / len(weights)).tolist()))
    return group.series(**spread(curves))


def layers(page: Page) -> Section | None:
    """Curvature and input of every layer."""
    found = page.analyses("layers", lambda v: {row["name"]: (row["largest"], row["input_moment"]) for row in v["rows"]})
    if not found:
        return None
    names = list(dict.fromkeys(name for _, runs in found for run in runs for name in run))
    titles = ("Largest eigenvalue of the layer’s block", "Mean square of what enters the layer")
    plots = []
    for which, title in enumerate(titles):
        series = [group.series(values=[_mean(runs, name, which) for name in names]) for group, runs in found]
        plots.append(page.draw("dots", title, {"rows": [str(name) for name in names], "series": series}))
    how = "There is one row per layer. Points further to the left are flatter layers, or layers with smaller inputs."
    return Section("layers", "Layer by layer", how, [page.legend(g for g, _ in found), beside(*plots)], "Layers")


def _mean(runs: list[dict[str, tuple[float | None, float | None]]], name: str, which: int) -> float | None:
    values = [value for run in runs if name in run and (value := run[name][which]) is not None]
    return fmean(values) if values else None


def noise(page: Page) -> Section | None:
    """Loss and error under noise on the weights."""
    plots = []
    for key, title, form in (("loss", "Loss", "number"), ("error", "Share of wrong labels", "percent")):
        series = lines(page, "noise", lambda v, key=key: pairs(v["ratios"], v[key]))  # type: ignore[misc]
        plots += [page.lines(title, series, {"label": "‖noise‖ / ‖weights‖"}, {"form": form})] if series else []
    how = "Random noise is added to the weights; the longer a curve stays low, the flatter the minimum is all around."
    body = [page.legend(), beside(*plots)]
    return Section("noise", "Noise on the weights", how, body, "Noise") if plots else None
