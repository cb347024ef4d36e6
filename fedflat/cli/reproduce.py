"""Run the experiments of a paper's table, and print our results beside the paper's.

The cells of the table run one after another. The same command continues after an interruption; finished runs are kept.
`--scale small` is a reduced version, which the file of the table defines, for two cores and some hours. Without
a name, list the tables.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedflat.cli.parser import Parser, add_data_root
from fedflat.errors import UnknownNameError
from fedflat.specs import values_in

if TYPE_CHECKING:
    from fedflat.report.paper_table import Cell, Table


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("table", nargs="?", metavar="TABLE", help="such as 003/table2, or your own FILE.toml")
    parser.add_argument("--scale", metavar="NAME", default="full", help="full, or a reduced version: small [full]")
    parser.add_argument("--rows", metavar="LIST", help='such as "FedAvg; FedAvg + const" [all of the scale]')
    parser.add_argument("--columns", metavar="LIST", help='such as "CIFAR-100, iid; CIFAR-10" [all of the scale]')
    parser.add_argument("--seeds", metavar="LIST", help="such as 0..2 [as many as the paper or the scale has]")
    parser.add_argument("--out", metavar="DIR", help="folder for the runs and the table [a folder in runs/]")
    parser.add_argument("--device", metavar="TEXT", default="auto", help="where clients train: cpu, cuda, … [auto]")
    add_data_root(parser)
    parser.add_argument("--list", action="store_true", help="list the tables, or the cells of one, and run nothing")


def execute(arguments: argparse.Namespace) -> int:
    """List tables or cells; or run the cells that are not finished, and print and write the table."""
    from fedflat.report.paper_table import load_table

    if arguments.table is None:
        return _list_tables()
    table, seeds = load_table(arguments.table), values_in("seed", arguments.seeds) if arguments.seeds else []
    cells = _chosen(table.cells(arguments.scale, seeds), "row", arguments.rows)
    cells = _chosen(cells, "column", arguments.columns)
    if arguments.list:
        return _list_cells(cells)
    out = Path(arguments.out or f"runs/{table.id.replace('/', '-')}-{arguments.scale}")
    return _reproduce(table, arguments, cells, out)


def _chosen(cells: list[Cell], what: Literal["row", "column"], wanted: str | None) -> list[Cell]:
    """The cells of the rows or columns that are asked for, separated by semicolons as names may contain commas."""
    if wanted is None:
        return cells
    names, known = [name.strip() for name in wanted.split(";")], dict.fromkeys(getattr(cell, what) for cell in cells)
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{what} of this table:", name, known)
    return [cell for cell in cells if getattr(cell, what) in names]


def _reproduce(table: Table, arguments: argparse.Namespace, cells: list[Cell], out: Path) -> int:
    from fedflat.cli.experiments import prepare, report_failures
    from fedflat.console import console, plain_table, say
    from fedflat.report.reproduction import CLAIM_HEADS, HEADS, analyse, reproduced, runs_of, tested, write
    from fedflat.runs.series import run_all

    scale, root, notes = arguments.scale, arguments.data_root, _notes(table, arguments.scale)
    runs = [replace(run, experiment=run.experiment.replace(device=arguments.device)) for run in runs_of(cells, out)]
    say("\n".join(notes))
    prepare([run.experiment for run in runs], root)
    watching = {"watch": tuple(table.setting("watch", scale)), "watch_every": table.setting("watch_every", scale)}
    run_all(runs, root=root, **(watching if watching["watch"] else {}))
    analyse(cells, out, table.setting("samples", scale), root, arguments.device)
    rows, claims = reproduced(cells, out), tested(table.setting("claims", scale), cells, out)
    console().print(plain_table(HEADS, [[row[head] for head in HEADS] for row in rows], numbers=(2, 3)))
    if claims:
        lines = [[str(claim[head]) for head in CLAIM_HEADS] for claim in claims]
        console().print(plain_table(CLAIM_HEADS, lines, numbers=(2, 3, 4)))
    say(f"written: {' and '.join(map(str, write(rows, notes, out, claims)))}")
    return report_failures(runs)


def _notes(table: Table, scale: str) -> list[str]:
    """What a reader must know about the table."""
    reduction = table.scale(scale)
    lines = [f"{table.id}, version {table.version}: {table.title} ({table.source})"]
    if reduction:
        lines.append(f"scale {scale}: {reduction['about']}; about {reduction['minutes']} minutes on two cores")
        lines += [f"why this scale: {reduction['why']}"] if "why" in reduction else []
    return [*lines, *table.notes]


def _list_tables() -> int:
    from fedflat.cli.presets import papers
    from fedflat.console import console, plain_table, tell
    from fedflat.report.paper_table import load_table, table_files

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
    from fedflat.console import console, plain_table

    rows = [(cell.column, cell.row, cell.figure, cell.experiments[0].method) for cell in cells]
    console().print(plain_table(("column", "row", "paper", "method"), rows, numbers=(2,)))
    return 0
