"""A picture of who holds what: clients across, classes upwards, the area of a dot the number of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedflat.core.samples import Samples
from fedflat.data.federation import Federation
from fedflat.data.samples import TensorSamples
from fedflat.errors import InputError
from fedflat.extras import blank_figure, save_figure
from fedflat.tasks.task import Task

MOST = 120  # clients that can still be told apart in one picture
KEPT, CLASSES = 200, 1000  # clients of which a run folder tells what they hold, and classes at most
INK, QUIET, GRID = "#1f2933", "#6b7785", "#e8ebef"


def partition_figure(counts: np.ndarray, path: str | Path, title: str = "") -> Path:
    """Draw a class-count matrix (clients, classes) to a file whose suffix names the format (.png, .svg, .pdf).

    Dots show samples of a class at a client, bars above them the clients' sizes, bars beside them the classes' sizes.
    Of more than 120 clients, evenly spaced ones are shown, and the title says so. Returns the path.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.size == 0:
        raise InputError(f"a class-count matrix has two axes, clients and classes; this one is {counts.shape}")
    shown = _spread(len(counts), MOST)
    part = counts[shown]
    width = float(np.clip(2.5 + 0.105 * len(shown), 6.0, 15.0))
    height = float(np.clip(2.6 + 0.27 * part.shape[1], 4.0, 12.0))
    figure = blank_figure(width, height)
    grid = figure.add_gridspec(2, 2, width_ratios=(width, 1.3), height_ratios=(0.9, height), wspace=0.02, hspace=0.03)
    middle = figure.add_subplot(grid[1, 0])
    _dots(middle, part, shown)
    _bars(figure.add_subplot(grid[0, 0], sharex=middle), part.sum(axis=1), upright=True)
    _bars(figure.add_subplot(grid[1, 1], sharey=middle), counts.sum(axis=0), upright=False)
    figure.suptitle(_title(counts, shown, title), fontsize=11, color=INK, x=0.01, ha="left")
    return save_figure(figure, path)


def _spread(count: int, most: int) -> np.ndarray:
    """All of so many clients, or as many as there may be, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def partition_record(federation: Federation) -> dict[str, Any]:
    """Who holds what, for a run folder: {"clients": N, "shown": [client, …], "counts": [[samples a class], …]}.

    Of more than 200 clients, evenly spaced ones are counted. Empty where targets are no classes, or where they lie in
    a dataset that would have to be read for them.
    """
    shown = _spread(len(federation), KEPT).tolist()
    labels = [_classes(federation.samples(client), federation.task) for client in shown]
    known = [held for held in labels if held is not None]
    if len(known) < len(shown):
        return {}
    classes = 1 + max(int(held.max(initial=-1)) for held in known)
    return {
        "clients": len(federation),
        "shown": shown,
        "counts": [np.bincount(held, minlength=classes).tolist() for held in known],
    }


def _classes(samples: Samples, task: Task) -> np.ndarray | None:
    """The labels of tensors whose targets are classes."""
    found = task.labels(samples.labels) if isinstance(samples, TensorSamples) else None
    if found is None:
        return None
    labels = found.numpy().astype(np.int64)
    return labels if ((labels >= 0) & (labels < CLASSES)).all() else None


def _title(counts: np.ndarray, shown: np.ndarray, title: str) -> str:
    held = (counts > 0).sum(axis=1).mean()
    mean = f"{held:.1f} of {counts.shape[1]} classes per client on average"
    facts = f"{len(counts)} clients, {counts.sum():,} samples, {mean}"
    some = f" ({len(shown)} of the clients shown)" if len(shown) < len(counts) else ""
    return f"{title}\n{facts}{some}" if title else facts + some


def _dots(axes: Any, part: np.ndarray, shown: np.ndarray) -> None:
    """One dot for each class at each client. The fullest about fills its cell."""
    clients, classes = part.shape
    inches = axes.figure.get_size_inches()
    cell = min(1.10 * inches[0] / clients, 0.65 * inches[1] / classes) * 72
    at, label = np.nonzero(part)
    amount = part[at, label]
    area = np.maximum(cell**2 * amount / part.max(), 0.4)
    axes.scatter(at, label, s=area, c=label, cmap=_colours(classes), vmin=0, vmax=max(1, classes - 1), linewidths=0)
    axes.set_xlim(-1, clients)
    axes.set_ylim(-0.8, classes - 0.2)
    axes.set_xlabel("client", color=QUIET)
    axes.set_ylabel("class", color=QUIET)
    places = np.arange(0, clients, max(1, clients // 10))
    axes.set_xticks(places, [str(shown[place]) for place in places])
    axes.set_yticks(np.arange(0, classes, max(1, classes // 10)))
    axes.grid(color=GRID, linewidth=0.6)
    _quieten(axes)


def _colours(classes: int) -> str:
    return "tab10" if classes <= 10 else "turbo"


def _bars(axes: Any, sizes: np.ndarray, upright: bool) -> None:
    """Sizes along an edge; only the largest is labelled."""
    (axes.bar if upright else axes.barh)(np.arange(len(sizes)), sizes, 0.72, color="#b8c2cc", linewidth=0)
    axes.tick_params(labelbottom=not upright, labelleft=upright)
    edge = axes.yaxis if upright else axes.xaxis
    edge.set_ticks([0, int(sizes.max())])
    axes.set_ylabel("samples", color=QUIET) if upright else axes.set_xlabel("samples", color=QUIET)
    _quieten(axes)


def _quieten(axes: Any) -> None:
    """Keep the data in front: no frame, small grey ticks."""
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, colors=QUIET)
    for spine in axes.spines.values():
        spine.set_visible(False)
