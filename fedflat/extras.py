"""Optional packages, imported when they are needed."""

from __future__ import annotations

import importlib
from io import BytesIO
from pathlib import Path
from typing import Any

from fedflat.errors import InputError


def needed(module: str, name: str, extra: str) -> Any:
    """Import an optional module.

    Args:
        module: The module's name.
        name: What the error calls it.
        extra: The extra of fedflat that installs it.

    Raises:
        InputError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{name} is not installed: pip install 'fedflat[{extra}]'") from None


def blank_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches, without pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install 'fedflat[report]'") from None

    class Picture(Figure):
        """A figure that notebooks show without pyplot."""

        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    figure = Picture(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure to a file whose suffix names the format."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=144)
    except (ValueError, OSError) as error:
        raise InputError(f"cannot write the picture {path}: {error}") from None
    return Path(path)
