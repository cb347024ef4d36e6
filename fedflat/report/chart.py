"""Curves in the terminal, drawn with braille characters of 2 × 4 dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a character
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        mark: The character at its end.
        colour: A colour name of rich.
        points: (x, y), sorted by x.
    """

    mark: str
    colour: str
    points: Points


@dataclass(frozen=True)
class Frame:
    """The range of values that a chart shows, and its size in characters."""

    left: float
    right: float
    low: float
    high: float
    width: int
    height: int

    def column(self, x: float) -> int:
        """The column of dots at x."""
        return round((x - self.left) / (self.right - self.left or 1) * (2 * self.width - 1))

    def row(self, y: float) -> int:
        """The row of dots at y, from the top."""
        return round((self.high - y) / (self.high - self.low) * (4 * self.height - 1))


def chart(curves: Sequence[Curve], width: int = 60, height: int = 12, title: str = "") -> Text:
    """Curves over common axes as text. `width` and `height` are in characters, without the labels."""
    from rich.text import Text

    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Text(f"{title}: nothing measured yet", style="dim")
    frame, ticks = _frame(curves, width, height)
    cells = _draw(curves, frame)
    names = {frame.row(tick) // 4: f"{tick:.6g}" for tick in ticks}
    margin, ends = max(map(len, names.values())), _ends(curves, frame)
    text = Text(f"{' ' * margin}  {title}\n", style="bold")
    for row in range(height):
        text.append(f"{names.get(row, ''):>{margin}} {'┤' if row in names else '│'}", style="not bold dim")
        for column in range(width):
            bits, colour = cells.get((row, column), (0, "default"))
            text.append(chr(BLANK + bits) if bits else " ", style=f"not bold {colour}")
        for curve in ends.get(row, []):
            text.append(f" {curve.mark}", style=f"bold {curve.colour}")
        text.append("\n")
    first, last = f"{frame.left:.6g}", f"{frame.right:.6g}"
    text.append(f"{' ' * margin} └{'─' * width}\n{' ' * (margin + 2)}", style="not bold dim")
    text.append(f"{first}{'round':^{max(5, width - len(first) - len(last))}}{last}", style="not bold dim")
    return text


def _frame(curves: Sequence[Curve], width: int, height: int) -> tuple[Frame, list[float]]:
    """The range of all points, widened to round numbers, and the ticks of the vertical axis."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    step = round_step((max(ys) - min(ys)) / max(2, height // 3) or abs(max(ys)) * 0.1 or 0.1)
    low, high = math.floor(min(ys) / step + 1e-9), math.ceil(max(ys) / step - 1e-9)
    high = max(high, low + 1)
    frame = Frame(min(xs), max(xs), low * step, high * step, width, height)
    return frame, [number * step for number in range(low, high + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`.

    >>> round_step(0.07), round_step(3)
    (0.1, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _draw(curves: Sequence[Curve], frame: Frame) -> dict[tuple[int, int], tuple[int, str]]:
    """Bits and colour of the characters that are not blank; where curves meet, the later one sets the colour."""
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for curve in curves:
        dots = [(frame.column(x), frame.row(y)) for x, y in curve.points]
        for x, y in [dots[0], *(dot for a, b in pairwise(dots) for dot in _line(a, b))]:
            bits, _ = cells.get((y // 4, x // 2), (0, ""))
            cells[y // 4, x // 2] = bits | DOTS[y % 4][x % 2], curve.colour
    return cells


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from after `start` up to `end`."""
    (x, y), (to_x, to_y) = start, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    return [(round(x + (to_x - x) * i / steps), round(y + (to_y - y) * i / steps)) for i in range(1, steps + 1)]


def _ends(curves: Sequence[Curve], frame: Frame) -> dict[int, list[Curve]]:
    """The curves by the row of characters in which they end."""
    ends: dict[int, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: -curve.points[-1][1]):
        ends.setdefault(frame.row(curve.points[-1][1]) // 4, []).append(curve)
    return ends
