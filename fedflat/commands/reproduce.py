"""Run the cells of a paper's table, and print ours beside the paper's.

Cells run one after another; run the same command again to go on, what is finished is kept. `--scale small` is a
reduction that the table's file declares, for two cores and less than an hour. Without a name: list the tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.commands.parser import Parser, add_data_root
from fedflat.errors import InputError
from fedflat.grid import values_in

if TYPE_CHECKING:
    from fedflat.presets.table import Cell, Table


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument(
        "table", nargs="?", metavar="TABLE", help="such as 003/table2, or a file of your own, FILE.toml"
    )
    parser.add_argument("--scale", metavar="NAME", default="full", help="full, or a reduction such as small [full]")
    parser.add_argument("--seeds", metavar="LIST", help="such as 0..2; else as many as the paper or the scale has")
    parser.add_argument("--out", metavar="DIR", help="folder for everything; under runs/ by default")
    add_data_root(parser)
    parser.add_argument("--list", action="store_true", help="list the tables, or the cells of one, and run nothing")


def execute(arguments: argparse.Namespace) -> int:
    """List, or run the cells that are not finished, print the table and write it."""
    from fedflat.presets.table import load_table

    if arguments.table is None:
        return _list_tables()
    table, seeds = load_table(arguments.table), values_in("seed", arguments.seeds) if arguments.seeds else []
    cells = table.cells(arguments.scale, seeds)
    if arguments.list:
        return _list_cells(cells)
    out = Path(arguments.out or f"runs/{table.id.replace('/', '-')}-{arguments.scale}")
    return _reproduce(cells, _notes(table, cells, arguments.scale), out, arguments.data_root)


def _reproduce(cells: list[Cell], notes: list[str], out: Path, root: str | None) -> int:
    from fedflat.commands.run import prepare, report_failures
    from fedflat.presets.reproduction import HEADS, reproduced, runs_of, write
    from fedflat.report.terminal import console, plain_table, say
    from fedflat.series import run_all

    runs = runs_of(cells, out)
    if not runs:
        raise InputError(f"no cell of this table can be run yet: {cells[0].missing}")
    say("\n".join(notes))
    prepare([run.experiment for run in runs], root)
    run_all(runs, root=root)
    rows = reproduced(cells, out)
    console().print(plain_table(HEADS, [[row[head] for head in HEADS] for row in rows], numbers=(2, 3)))
    say(f"written: {' and '.join(map(str, write(rows, notes, out)))}")
    return report_failures(runs)


def _notes(table: Table, cells: list[Cell], scale: str) -> list[str]:
    """What a reader must know of the table before its figures."""
    reduction = table.scale(scale)
    lines = [f"{table.id}, version {table.version}: {table.title} ({table.source})"]
    if reduction:
        lines.append(f"scale {scale}: {reduction['about']}; about {reduction['minutes']} minutes on two cores")
    missing = dict.fromkeys(cell.missing for cell in cells if cell.missing)
    return [*lines, *table.notes, *(f"left out: {reason}" for reason in missing)]


def _list_tables() -> int:
    from fedflat.commands.presets import papers
    from fedflat.presets.table import load_table, table_files
    from fedflat.report.terminal import console, plain_table, tell

    rows = []
    for name in table_files():
        table = load_table(name)
        scales = ", ".join(f"{scale} (about {values['minutes']} min)" for scale, values in table.scales.items())
        cells = sum(bool(figure) for figures in table.figures.values() for figure in figures)
        rows.append((name, table.title, str(cells), scales))
    console().print(plain_table(("table", "about", "cells", "scales besides full"), rows, numbers=(2,)))
    tell("\n".join(papers()))
    return 0


def _list_cells(cells: list[Cell]) -> int:
    from fedflat.report.terminal import console, plain_table

    rows = [(cell.column, cell.row, cell.figure, cell.missing or cell.experiments[0].method) for cell in cells]
    console().print(plain_table(("column", "row", "paper", "method"), rows, numbers=(2,)))
    return 0
