"""Ours beside the paper's: what the runs of a table's cells gave so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedflat.presets.table import Cell
from fedflat.report.quantities import shown, summary
from fedflat.report.records import record_of
from fedflat.report.tabular import markdown
from fedflat.series import Member, series
from fedflat.store import write_atomically

HEADS = ("column", "row", "ours", "paper")


def runs_of(cells: Iterable[Cell], out: Path) -> list[Member]:
    """The runs of all cells, each once: one may serve several figures."""
    found = (member for cell in cells for member in series(cell.experiments, out, cell.preset))
    return list({member.folder: member for member in found}.values())


def reproduced(cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """One dict a cell: column, row, ours and the paper's as text, ours as numbers, its seeds, method and folders."""
    return [_row(cell, out) for cell in cells]


def _row(cell: Cell, out: Path) -> dict[str, Any]:
    runs = runs_of([cell], out)
    done = [record_of(run.folder) for run in runs if run.finished]
    found = summary(cell.quantity, done)
    rounds = cell.experiments[0].rounds if cell.experiments else 0
    ours = shown(cell.quantity, found["mean"], found["std"], rounds)
    return {
        "column": cell.column,
        "row": cell.row,
        "ours": ours,
        "paper": cell.figure,
        "quantity": cell.quantity,
        **{name: value if value is not None and math.isfinite(value) else None for name, value in found.items()},
        "seeds": [record.experiment.seed for record in done],
        "method": cell.experiments[0].method if cell.experiments else None,
        "folders": [run.folder.name for run in runs],
        "missing": cell.missing or None,
    }


def write(rows: Sequence[dict[str, Any]], notes: Sequence[str], out: Path) -> list[Path]:
    """Write the rows as `table.json`, and with the notes as `table.md`; returns the two paths."""
    texts = {
        "table.json": json.dumps({"notes": notes, "cells": rows}, indent=1, ensure_ascii=False) + "\n",
        "table.md": markdown(HEADS, [[row[head] for head in HEADS] for row in rows], notes),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    return [out / name for name in texts]
