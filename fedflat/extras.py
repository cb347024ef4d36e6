"""Packages that are only needed for some things, imported when they are."""

from __future__ import annotations

from typing import Any

from fedflat.errors import InputError


def blank_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches; pyplot and its global state are left alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install 'fedflat[report]'") from None
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure
