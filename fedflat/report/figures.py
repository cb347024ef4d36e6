"""Figures of runs, with matplotlib but without pyplot and its global state, so no screen is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.core.curves import written
from fedflat.core.fairness import Fairness
from fedflat.errors import InputError
from fedflat.extras import blank_figure, save_figure
from fedflat.runs.records import Record, RunLike, first_measured, lead_of, records_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
INK, QUIET, GRID = "#1f2933", "#5b6673", "#e8ebef"
SMOOTH = 0.05  # window of the moving average, as a fraction of the rounds
LEGEND = 105  # characters per line of the legend
LONG = 40  # a curve of this number of evaluated rounds or more is smoothed


def curves(runs: Iterable[RunLike | Record | str | Path], path: str | Path, title: str = "") -> Path:
    """Save `curves_figure` to a file; its suffix sets the format (.png, .svg, .pdf). Returns the path."""
    return save_figure(curves_figure(runs, title), path)


def curves_figure(runs: Iterable[RunLike | Record | str | Path], title: str = "") -> Figure:
    """Accuracy (or the leading metric) and loss over the rounds; without them, the clients' mean and the training loss.

    A long curve is drawn twice: every round in a light colour, and a centred moving average over 5 % of the rounds.

    Args:
        runs: Runs or run folders, finished or not.
    """
    figure: Figure = blank_figure(10, 4.4)
    records = records_of(runs)
    if not any(record.metrics for record in records):
        raise InputError("there is nothing to draw: no round of these runs has ended yet")
    left, right = figure.subplots(1, 2)
    first = lead_of(records)
    second = ("loss", "train_loss") if first != "loss" else ("train_loss",)
    choices = ((left, (first, "personal_mean")), (right, second))
    smoothed = [_panel(axes, records, first_measured(records, *names)) for axes, names in choices]
    handles, names = left.get_legend_handles_labels()
    columns = max(1, min(len(names), 4, LEGEND // (8 + max(map(len, names), default=0))))
    look: dict[str, Any] = {"fontsize": 10, "frameon": False, "labelcolor": INK, "handlelength": 2.6}
    place: dict[str, Any] = {"loc": "outside upper left", "alignment": "left", "ncols": columns}
    figure.legend(handles, names, title=title or None, **place, **look)
    if any(smoothed):
        note = f"light: every evaluated round; dark: moving average over {SMOOTH:.0%} of them"
        figure.supxlabel(note, fontsize=8, color=QUIET, x=0.99, ha="right")
    return figure


def _panel(axes: Any, records: Sequence[Record], name: str) -> bool:
    """One metric of all runs. Returns whether a moving average was drawn."""
    smoothed = False
    for place, record in enumerate(records):
        rounds, values = [x for x, _ in record.points(name)], [y for _, y in record.points(name)]
        look = {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place % len(STYLES)]}
        window = int(SMOOTH * len(values)) if len(values) >= LONG else 1
        if window > 1:
            axes.plot(rounds, values, color=look["color"], alpha=0.22, linewidth=0.9)
            smoothed = True
        look |= {"marker": "o"} if len(values) == 1 else {}
        axes.plot(rounds, moving_average(values, window), label=record.label, linewidth=1.9, **look)
    _dress(axes, written(name))
    return smoothed


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values; the window shrinks towards both ends, so that the end values stay the same.

    >>> moving_average([1.0, 2.0, 6.0, 1.0], 3)
    [1.0, 3.0, 3.0, 1.0]
    """
    last = len(values) - 1
    reaches = [min(window // 2, place, last - place) for place in range(len(values))]
    parts = [values[place - reach : place + reach + 1] for place, reach in enumerate(reaches)]
    return [sum(part) / len(part) for part in parts]


def _dress(axes: Any, name: str) -> None:
    """A light grid, no frame, small grey labels."""
    axes.set_title(name, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel("round", color=QUIET, fontsize=9)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors=QUIET)
    axes.margins(x=0.01)
    for spine in axes.spines.values():
        spine.set_visible(False)


def distribution(runs: Iterable[RunLike | Record | str | Path], path: str | Path, bins: int = 20) -> Path:
    """Draw histograms of the clients' accuracies at the last evaluation, one per run. Returns the path.

    Filled bars show each client's own model (the common one if the method has no other), outlines the common model.
    Lines mark the mean over the clients and the mean of the worst 5 %.
    """
    found = [(record.label, *record.client_accuracies()) for record in records_of(runs)]
    shown = [(label, own, common) for label, own, common in found if own]
    if not shown:
        raise InputError("there is nothing to draw: no client of these runs was evaluated on data of its own")
    figure = blank_figure(7, 0.6 + 0.85 * len(shown))
    rows = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (label, own, common) in zip(rows, shown, strict=True):
        _bars(axes, label, own, common, bins)
    rows[-1].set_xlabel("accuracy of a client on its own test data", color=QUIET, fontsize=9)
    return save_figure(figure, path)


def _bars(axes: Any, label: str, own: list[float], common: list[float], bins: int) -> None:
    fairness, edges = Fairness.of(own), [place / bins for place in range(bins + 1)]
    axes.hist(own, bins=edges, color=COLOURS[0], alpha=0.75)
    if common and common != own:
        axes.hist(common, bins=edges, histtype="step", color=INK, linewidth=1)
    for value, style in ((fairness.mean, "-"), (fairness.low5, ":")):
        axes.axvline(value, color=COLOURS[1], linestyle=style, linewidth=1.6)
    _dress(axes, "")
    axes.set_title(label, loc="left", fontsize=9, color=INK, pad=2)
    axes.set_xlabel("")
    axes.set_xlim(0, 1)
    axes.text(0, 0.75, f" mean {fairness.mean:.1%}, lowest 5 % {fairness.low5:.1%}", **_corner(axes))


def _corner(axes: Any) -> dict[str, Any]:
    return {"transform": axes.transAxes, "fontsize": 8, "color": QUIET}
