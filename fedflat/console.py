"""Console output: lines on stdout and stderr, and plain tables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.words import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 120  # columns of output that is not a terminal: enough for two charts side by side


def in_notebook() -> bool:
    """Whether the code runs in the kernel of a notebook. Imports nothing: IPython is loaded there already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def console(stderr: bool = False) -> Console:
    """A console on stdout or stderr. Outside a terminal it has `WIDE` columns unless $COLUMNS is set."""
    from rich import console as rich

    class Console(rich.Console):
        """A console that ends without an error when its reader, such as `head`, closes the pipe."""

        def on_broken_pipe(self) -> None:
            with contextlib.suppress(SystemExit):
                super().on_broken_pipe()
            raise SystemExit(0)

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal or "COLUMNS" in os.environ else WIDE)


def tell(text: str) -> None:
    """Print a result as plain text on stdout."""
    console().print(printable(text), soft_wrap=True, markup=False)


def say(line: str) -> None:
    """Print one plain line about progress on stderr."""
    console(stderr=True).print(printable(line), soft_wrap=True, markup=False)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """A table with one line, under the header. Columns in `numbers` are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1))
    for place, head in enumerate(heads):
        right = place in numbers
        style = "bold" if place == 0 else None
        table.add_column(head, justify="right" if right else "left", no_wrap=right, style=style, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def shown_path(path: Path) -> Path:
    """Relative to the current folder where it lies below it."""
    full, here = path.absolute(), Path.cwd()
    return full.relative_to(here) if full.is_relative_to(here) else path
