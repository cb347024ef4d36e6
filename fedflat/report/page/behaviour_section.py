"""How the models behave: training against test data, confidence against accuracy, and without some weights."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedflat.report.page.flatness import lines, pairs
from fedflat.report.page.markup import Section, table
from fedflat.report.page.page import Page, beside, named
from fedflat.words import MISSING, TIE, with_spread

HEADS = ("clean", "mean of all", "drop")
GAPS = {
    "training loss": "train_loss",
    "test loss": "test_loss",
    "loss gap": "loss_gap",
    "training accuracy": "train_accuracy",
    "test accuracy": "test_accuracy",
    "accuracy gap": "accuracy_gap",
}


def generalisation(page: Page) -> Section | None:
    """Training against test data."""
    found = page.analyses("generalisation", lambda v: {head: float(v[name]) for head, name in GAPS.items()})
    how = "A model that generalises does as well on new data as on those it has seen: the smaller the gaps, the better."
    title = "Training against test data"
    return _table(found, "generalisation", title, how, "Gaps") if found else None


def _table(found: Sequence[tuple[Any, list[dict[str, float]]]], key: str, title: str, how: str, menu: str) -> Section:
    """One row per group: mean and deviation over its seeds of whatever the first run has."""
    heads = list(found[0][1][0])
    rows = [
        [named(group), *(with_spread([run[h] for run in runs if h in run]) for h in heads)] for group, runs in found
    ]
    return Section(key, title, how, [table(["method", *heads], rows, title)], menu)


def calibration(page: Page) -> Section | None:
    """The reliability diagram."""
    series = lines(page, "calibration", lambda v: pairs(_middles(len(v["accuracy"])), v["accuracy"]))
    if not series:
        return None
    errors = page.analyses("calibration", lambda v: float(v["error"]))
    rows = [[named(group), with_spread(values)] for group, values in errors]
    axes = {"label": "confidence", "form": "percent"}, {"form": "percent"}
    drawn = page.lines("Accuracy at each confidence", series, *axes, diagonal=True)
    how = (
        "On the diagonal a model is as often right as it is sure; below it, it is overconfident. The calibration "
        "error is the mean distance from it."
    )
    body = [page.legend(), beside(drawn, table(["method", "calibration error"], rows, "Calibration error"))]
    return Section("calibration", "Does it know what it knows?", how, body, "Calibration")


def _middles(bins: int) -> list[float]:
    """Of equal parts of [0, 1], where curves of different runs can be averaged."""
    return [(place + 0.5) / bins for place in range(bins)]


def corruptions(page: Page) -> Section | None:
    """Accuracy on corrupted test images: one row per corruption, one column per group."""
    found = page.analyses("corruptions", _damaged)
    if not found:
        return None
    first = found[0][1][0]
    order = [*HEADS, *sorted(set(first) - set(HEADS), key=lambda name: -first[name])]
    rows = [
        [name.replace("_", " "), *(_percents([run[name] for run in runs if name in run]) for _, runs in found)]
        for name in order
    ]
    how = (
        "Test images with noise, blur, weather or digital damage. A better model is better on damaged images, too, so "
        "read the drop beside the accuracy on clean ones."
    )
    body = [table(["images", *(group.label for group, _ in found)], rows, "Accuracy on corrupted images")]
    return Section("corruptions", "Corrupted images", how, body, "Corruptions")


def _damaged(values: dict[str, Any]) -> dict[str, float]:
    return {"clean": values["clean"], "mean of all": values["mean"], "drop": values["drop"], **values["by_corruption"]}


def _percents(values: Sequence[float]) -> str:
    return f"{with_spread([100 * value for value in values])}{TIE}%" if values else MISSING


def pruning(page: Page) -> Section | None:
    """How classes separate without some of the weights."""
    found = page.analyses("pruning", lambda v: {str(name): float(value) for name, value in v["silhouettes"].items()})
    how = (
        "Silhouettes of the classes in the features (1 is well apart, 0 is mixed), and what is left of them without a "
        "fifth of the weights: a robust model loses little."
    )
    return _table(found, "pruning", "Without some of the weights", how, "Pruning") if found else None


def apart(page: Page) -> Section | None:
    """What one round more does to some clients' models."""
    found = page.analyses("clients", _apart)
    how = (
        "Some clients train for one round more: a gradient signal that lasts, curvatures alike (H_N near 0, H_D near "
        "1) and no barrier on the lines between their models mean that averaging them loses nothing."
    )
    return _table(found, "apart", "How far one round takes the clients apart", how, "Apart") if found else None


def _apart(values: dict[str, Any]) -> dict[str, float]:
    return {
        "signal, first step": fmean(values["first"]),
        "signal, last step": fmean(values["last"]),
        "H_N": float(values["curvature"]["norm"]),
        "H_D": float(values["curvature"]["direction"]),
        "highest barrier": float(max(map(max, values["lines"]["barrier"]))),
    }
