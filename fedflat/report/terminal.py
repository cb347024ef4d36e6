"""Tables and charts for the terminal, with rich."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from fedflat.report.chart import Curve, chart
from fedflat.report.records import TAIL, Record, presets
from fedflat.report.words import MISSING, duration, percent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDE = 120  # columns assumed where nobody looks through a terminal, and enough for two charts abreast
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#0072b2")  # Okabe and Ito's
SHADES = " ░▒▓█"


def console(stderr: bool = False) -> Console:
    """Where to write. Outside a terminal lines may be long, unless $COLUMNS says otherwise."""
    from rich import console as rich

    class Console(rich.Console):
        """A reader who has had enough, such as `head`, is no error."""

        def on_broken_pipe(self) -> None:
            with contextlib.suppress(SystemExit):
                super().on_broken_pipe()
            raise SystemExit(0)

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal or "COLUMNS" in os.environ else WIDE)


def tell(text: str) -> None:
    """Plain text on stdout: what was asked for."""
    console().print(text, soft_wrap=True, markup=False)


def say(line: str) -> None:
    """One plain line on stderr: how it goes."""
    console(stderr=True).print(line, soft_wrap=True, markup=False)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """A table without lines but one. The first column never breaks; columns in `numbers` are flush right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1))
    for place, head in enumerate(heads):
        right = place in numbers
        style = "bold" if place == 0 else None
        table.add_column(head, justify="right" if right else "left", no_wrap=right, style=style, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def score(value: float | None) -> str:
    """An accuracy or a loss with four decimals; a dash where there is none."""
    return MISSING if value is None else f"{value:.4f}"


SPREADS = (("common model", "clients"), ("own models", "personal"))


def _over_clients(record: Record, prefix: str) -> str:
    """Mean and tails over the clients, each on its own test data."""
    mean, low, top = (score(record.last(f"{prefix}_{name}")) for name in ("mean", "low5", "top5"))
    return f"clients' mean {mean}, lowest 5 % {low}, highest 5 % {top}"


def result_table(record: Record) -> Table:
    """What came of one run."""
    table = plain_table(("", ""), result_facts(record))
    table.show_header, table.box = False, None
    return table


def result_facts(record: Record) -> list[tuple[str, str]]:
    """What came of one run, each figure under its name."""
    best, seconds = record.best(), record.seconds
    each = f" ({seconds / record.rounds:.3g} s a round)" if record.rounds else ""
    rows = [
        ("final accuracy", score(record.last())),
        ("best accuracy", f"{best[1]:.4f} in round {best[0]}" if best else MISSING),
        ("final loss", score(record.last("loss"))),
        ("rounds", f"{record.rounds} of {record.experiment.rounds}{_stop(record)}"),
        ("time", duration(seconds) + each),
    ]
    rows[3:3] = [
        (label, _over_clients(record, prefix)) for label, prefix in SPREADS if record.last(f"{prefix}_mean") is not None
    ]
    rows += [("preset", text) for text in presets([record])]
    if record.path:
        rows.append(("files", f"{shown_path(record.path)}{os.sep}"))
    return rows


def _stop(record: Record) -> str:
    return f", stopped: {record.stopped}" if record.unfinished and record.stopped else ""


def shown_path(path: Path) -> Path:
    """Relative to the current folder where it lies below it."""
    full, here = path.absolute(), Path.cwd()
    return full.relative_to(here) if full.is_relative_to(here) else path


def runs_table(records: Sequence[Record]) -> Table:
    """One row a run: rounds, last, best and tail average of the accuracy, seconds a round; below, their presets."""
    from rich.markup import escape

    heads = ("", "run", "rounds", "last", "best", "at", "tail", "s/round")
    table = plain_table(heads, [], numbers=range(2, len(heads)))
    notes = [f"tail: mean over the last {percent(TAIL, 0)} of the rounds", *_presets(records)]
    table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    for place, record in enumerate(records):
        table.add_row(*_run_row(place, record))
    return table


def _presets(records: Sequence[Record]) -> list[str]:
    """What presets runs were made from, a line each, with the letters of its runs where these are not all."""
    found = presets(records).items()
    return [
        f"preset {text}" if len(places) == len(records) else f"{', '.join(map(mark, places))}: preset {text}"
        for text, places in found
    ]


def _run_row(place: int, record: Record) -> list[Any]:
    from rich.text import Text

    best, rounds = record.best(), record.experiment.rounds
    done = f"{record.rounds} of {rounds}" if record.unfinished else f"{rounds}"
    done += ", stopped" if record.unfinished and record.stopped else ""
    pace = f"{record.seconds / record.rounds:.3g}" if record.rounds else MISSING
    numbers = (done, score(record.last()), score(best[1] if best else None), str(best[0]) if best else MISSING)
    return [Text(mark(place), style=colour(place)), Text(record.label), *numbers, score(record.tail()), pace]


def mark(place: int) -> str:
    """The letter of the n-th run."""
    return ascii_lowercase[place % 26]


def colour(place: int) -> str:
    """The colour of the n-th run, as rich names it."""
    return COLOURS[place % len(COLOURS)]


def charts(records: Sequence[Record], width: int) -> RenderableType:
    """Accuracy and loss over the rounds: side by side where there is room, else one below the other."""
    from rich.console import Group
    from rich.table import Table

    abreast = width >= WIDE
    size = (width - 26) // 2 if abreast else min(width - 16, 100)
    pair = [_chart(records, name, size) for name in ("accuracy", "loss")]
    if not abreast:
        return Group(pair[0], "", pair[1])
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*pair)
    return grid


def _chart(records: Sequence[Record], name: str, width: int) -> Text:
    lines = [Curve(mark(i), colour(i), record.points(name)) for i, record in enumerate(records)]
    return chart(lines, max(width, 10), 12, name)


def counts_table(counts: Any) -> Table:
    """Sizes of the clients and classes per client, of a class-count matrix (clients, classes)."""
    sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    rows = [(name, *_spread(values)) for name, values in (("samples a client", sizes), ("classes a client", held))]
    rows.append(("samples a class", *_spread(counts.sum(axis=0))))
    return plain_table(("", "least", "median", "most"), rows, numbers=(1, 2, 3))


def _spread(values: Any) -> tuple[str, str, str]:
    ordered = sorted(int(value) for value in values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return str(ordered[0]), f"{middle:g}", str(ordered[-1])


def counts_map(counts: Any, width: int) -> Text:
    """A class-count matrix in shades: clients across, classes down; what does not fit is left out and said so."""
    from rich.text import Text

    part = counts[: width - 8, :20]
    top = max(int(part.max(initial=0)), 1)
    text = Text("class\n", style="dim")
    for label, row in enumerate(part.T):
        cells = "".join(SHADES[-(-4 * int(value) // top)] for value in row)
        text.append(f"{label:>5} ", style="dim").append(cells, style=f"not dim {COLOURS[0]}").append("\n")
    left_out = "" if part.shape == counts.shape else f" (the first {part.shape[0]}, and {part.shape[1]} classes)"
    return text.append(f"      clients from 0{left_out}; █ is up to {top} samples")
