"""What all matplotlib figures share: colours, plain axes, a matrix. The global state of matplotlib does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

BLUE, RED, QUIET = "#0072b2", "#d55e00", "#5b6673"
SERIES = (BLUE, RED, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's


def dress(axes: Any, title: str, x: str, y: str) -> None:
    """Set title and labels, and remove all lines except those of the data."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x, color=QUIET, fontsize=9)
    axes.set_ylabel(y, color=QUIET, fontsize=9)
    axes.tick_params(length=0, labelsize=9, colors=QUIET)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_matrix(figure: Any, axes: Any, values: Tensor, title: str, names: Sequence[int]) -> None:
    """A square matrix as shades, with one name per row and column."""
    top = float(values.max()) or 1.0  # imshow needs a range even if every barrier is zero
    figure.colorbar(axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=top), ax=axes)
    axes.set_xticks(range(len(values)), list(map(str, names)))
    axes.set_yticks(range(len(values)), list(map(str, names)))
    dress(axes, title, "", "")
