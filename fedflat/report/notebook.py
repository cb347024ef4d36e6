"""Runs in a notebook: columns of their tables as arrays, and a card with figures and curves."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedflat.report.figures import COLOURS
from fedflat.report.records import Record, first_measured
from fedflat.report.tabular import in_html
from fedflat.report.terminal import result_facts

WIDTH, HEIGHT, PAD = 260, 90, 16


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Arrays by name, one value a row; nan where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def summary(record: Record) -> str:
    """What was run, what came of it, and two small curves, as HTML that needs nothing else."""
    e = record.experiment
    names = (first_measured([record], *names) for names in (("accuracy", "personal_mean"), ("loss", "train_loss")))
    heads = (e.method, f"{e.model} on {e.data}, {e.partition}, {e.clients} clients, seed {e.seed}")
    curves = [_curve(name, record.points(name)) for name in names]
    return in_html(heads, result_facts(record), side="left") + "".join(curves)


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """A line of one metric over the rounds as SVG, with its lowest and highest value."""
    if not points:
        return ""
    rounds, values = [x for x, _ in points], [y for _, y in points]
    xs = _scaled(rounds, 2, WIDTH - 2)
    ys = _scaled(values, HEIGHT - PAD, PAD)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    said = f"{name}: {min(values):.4g} to {max(values):.4g}, round {rounds[0]} to {rounds[-1]}"
    return (
        f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" font-size="11" fill="currentColor" style="margin:4px 12px">'
        f'<title>{html.escape(said)}</title><text x="2" y="11">{html.escape(said)}</text>'
        f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.8"/>'
        f'<circle cx="{xs[-1]:.1f}" cy="{ys[-1]:.1f}" r="2.5" fill="{COLOURS[0]}"/></svg>'
    )


def _scaled(values: Sequence[float], low: float, high: float) -> list[float]:
    """Values laid out from `low` to `high`; in the middle where they are all one."""
    least, most = min(values), max(values)
    return [low + (high - low) * ((value - least) / (most - least) if most > least else 0.5) for value in values]
