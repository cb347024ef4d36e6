"""Tables and charts for the terminal, with rich."""

from __future__ import annotations

import os
from collections.abc import Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from fedflat.console import WIDE, plain_table, shown_path
from fedflat.core.curves import written
from fedflat.report.chart import Curve, chart
from fedflat.runs.records import TAIL, Record, lead_of, presets, shared_setting
from fedflat.words import MISSING, duration, parameters_told, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#0072b2")  # Okabe and Ito's
SHADES = " ░▒▓█"


def score(value: float | None) -> str:
    """An accuracy or a loss with four decimals; a dash for None."""
    return MISSING if value is None else f"{value:.4f}"


SPREADS = (("common model", "clients"), ("own models", "personal"))


def _over_clients(record: Record, prefix: str) -> str:
    """Mean and 5 % tails over the clients, each on its own test data."""
    mean, low, top = (score(record.last(f"{prefix}_{name}")) for name in ("mean", "low5", "top5"))
    return f"clients' mean {mean}, lowest 5 % {low}, highest 5 % {top}"


def result_table(record: Record) -> Table:
    """The results of one run."""
    table = plain_table(("", ""), result_rows(record))
    table.show_header, table.box = False, None
    return table


def result_rows(record: Record) -> list[tuple[str, str]]:
    """The results of one run as (name, text)."""
    best, seconds = record.best(), record.seconds
    each = f" ({seconds / record.rounds:.3g} s per round)" if record.rounds else ""
    rows = [
        (f"final {written(record.lead)}", score(record.last())),
        (f"best {written(record.lead)}", f"{best[1]:.4f} in round {best[0]}" if best else MISSING),
        *((f"final {written(name)}", score(record.last(name))) for name in other_metrics(record)),
        ("rounds", f"{record.rounds} of {record.experiment.rounds}{_stop(record)}"),
        ("time", duration(seconds) + each),
    ]
    rows[-2:-2] = [
        (label, _over_clients(record, prefix)) for label, prefix in SPREADS if record.last(f"{prefix}_mean") is not None
    ]
    e, size = record.experiment, parameters_told(record.details)
    rows.append(("data", f"{e.data}, {e.clients} clients, {e.partition}"))
    loss = record.details.get("loss") if e.loss == "auto" else e.loss
    rows.append(("model", e.model + (f", {size}, loss {loss}" if size else "")))
    rows += [("preset", text) for text in presets([record])]
    if record.path:
        rows.append(("files", f"{shown_path(record.path)}{os.sep}"))
    return rows


def other_metrics(record: Record) -> list[str]:
    """The metrics besides the leading one, on all test sets, without those per class."""
    known = [name for name in record.task.get("metrics", {"loss": None}) if name not in ("iou", record.lead)]
    tests = record.task.get("tests", ())
    return [*known, *(f"{test}_{name}" for test in tests for name in (record.lead, *known))]


def _stop(record: Record) -> str:
    return f", stopped: {record.stopped}" if record.unfinished and record.stopped else ""


def runs_table(records: Sequence[Record]) -> Table:
    """One row per run: rounds, last, best and tail average of the accuracy, seconds per round; below, the presets."""
    from rich.markup import escape

    heads = ("", "run", "rounds", "last", "best", "at", "tail", "s/round")
    table = plain_table(heads, [], numbers=range(2, len(heads)))
    notes = [shared_setting(records), f"tail: mean over the last {percent(TAIL, 0)} of the rounds", *_presets(records)]
    table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    for place, record in enumerate(records):
        table.add_row(*_run_row(place, record))
    return table


def _presets(records: Sequence[Record]) -> list[str]:
    """The presets of the runs, one line each, with the marks of its runs unless all runs have it."""
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
    """The character that marks the n-th run."""
    return ascii_lowercase[place % 26]


def colour(place: int) -> str:
    """The colour of the n-th run, for rich."""
    return COLOURS[place % len(COLOURS)]


def charts(records: Sequence[Record], width: int) -> RenderableType:
    """Accuracy and loss over the rounds, side by side if the width allows it."""
    from rich.console import Group
    from rich.table import Table

    abreast = width >= WIDE
    size = (width - 26) // 2 if abreast else min(width - 16, 100)
    pair = [_chart(records, name, size) for name in dict.fromkeys((lead_of(records), "loss"))]
    if len(pair) == 1:
        return pair[0]
    if not abreast:
        return Group(pair[0], "", pair[1])
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*pair)
    return grid


def _chart(records: Sequence[Record], name: str, width: int) -> Text:
    lines = [Curve(mark(i), colour(i), record.points(name)) for i, record in enumerate(records)]
    return chart(lines, max(width, 10), 12, written(name))


def counts_table(counts: Any) -> Table:
    """Samples and classes per client and samples per class, from a count matrix (clients, classes)."""
    sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    rows = [(name, *_spread(values)) for name, values in (("samples per client", sizes), ("classes per client", held))]
    rows.append(("samples per class", *_spread(counts.sum(axis=0))))
    return plain_table(("", "least", "median", "most"), rows, numbers=(1, 2, 3))


def _spread(values: Any) -> tuple[str, str, str]:
    ordered = sorted(int(value) for value in values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return str(ordered[0]), f"{middle:g}", str(ordered[-1])


def counts_map(counts: Any, width: int) -> Text:
    """A count matrix in shades, clients horizontally, classes vertically; a note says if some did not fit."""
    from rich.text import Text

    part = counts[: width - 8, :20]
    top = max(int(part.max(initial=0)), 1)
    text = Text("class\n", style="dim")
    for label, row in enumerate(part.T):
        cells = "".join(SHADES[-(-4 * int(value) // top)] for value in row)
        text.append(f"{label:>5} ", style="dim").append(cells, style=f"not dim {COLOURS[0]}").append("\n")
    left_out = "" if part.shape == counts.shape else f" (the first {part.shape[0]}, and {part.shape[1]} classes)"
    return text.append(f"      clients from 0{left_out}; █ is up to {top} samples")
