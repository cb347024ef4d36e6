"""Analyse finished runs: curvature, landscapes, robustness, calibration.

Tables and figures are written into the run folders. Most analyses look at each run separately; `interpolation` needs
two runs and `plane` needs three.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.cli.parser import Parser, add_data_root
from fedflat.cli.user_code import made
from fedflat.specs import split

WHAT = "curvature,landscape"
ABREAST = 6  # runs beside each other in a table


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders that contain them")
    parser.add_argument("--what", metavar="LIST", default=WHAT, help=f"analyses, separated by commas [{WHAT}]")
    parser.add_argument("--list", action="store_true", help="list the available analyses")
    own = "MODULE:FUNCTION that makes the {}, if the runs used your own"
    parser.add_argument("--model", metavar="NAME", default="", help=own.format("model"))
    parser.add_argument("--federation", metavar="NAME", default="", help=own.format("federation"))
    add_data_root(parser)
    parser.add_argument("--client", metavar="N", type=int, help="analyse this client's own model on its own data")
    parser.add_argument("--samples", metavar="N", type=int, default=2000, help="number of samples to use [2000]")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed for samples and random directions [0]")
    parser.add_argument(
        "--device", metavar="TEXT", default="auto", help="where to compute: cpu, cuda, cuda:1, … [auto]"
    )
    about = "number of processes on the CPU; 0: one per core [0]"
    parser.add_argument("--workers", metavar="N", type=int, default=0, help=about)
    parser.add_argument("--out", metavar="FOLDER", help="write tables and figures there, not into the run folders")
    parser.add_argument("--severity", metavar="N", type=int, default=5, help="of --what corruptions, 1 to 5 [5]")
    about = "memory for activations in GiB; more makes curvature faster [2]"
    parser.add_argument("--memory", metavar="GIB", type=float, default=2.0, help=about)


def execute(arguments: argparse.Namespace) -> int:
    """Analyse the runs and print a table per analysis."""
    from fedflat.errors import InputError
    from fedflat.runs.records import expand
    from fedflat.studies.study import study

    if arguments.list:
        return _list_studies()
    if not arguments.runs:
        raise InputError("name the run folders to analyse, such as runs/first (--list shows the analyses)")
    own = {name: made(f"--{name}", getattr(arguments, name)) for name in ("model", "federation")}
    runs = [str(folder) for run in arguments.runs for folder in expand(Path(run))]
    found = study(
        runs,
        split(arguments.what),
        root=arguments.data_root,
        samples=arguments.samples,
        seed=arguments.seed,
        workers=arguments.workers,
        memory=arguments.memory,
        progress=True,
        out=arguments.out,
        client=arguments.client,
        severity=arguments.severity,
        device=arguments.device,
        observe=_show_detail,
        **own,
    )
    _show(found, runs, arguments.out)
    return 0


def _list_studies() -> int:
    from fedflat.console import console, plain_table
    from fedflat.studies.study import STUDIES

    console().print(plain_table(("analysis", "about"), [(name, each.about) for name, each in STUDIES.items()]))
    return 0


def _cell(value: float) -> str:
    """Four digits; a dash for nan."""
    return "–" if math.isnan(value) else f"{value:.4g}"


def _show_detail(name: str, results: Mapping[str, Any]) -> None:
    """Print one row per further number of an analysis, such as a corruption, and one column per run."""
    from fedflat.console import console, plain_table
    from fedflat.studies.study import STUDIES

    detail = STUDIES[name].detail
    if detail is None or len(results) > ABREAST:
        return
    columns = {run: detail(result) for run, result in results.items()}
    rows = [(row, *(_cell(values[row]) for values in columns.values())) for row in next(iter(columns.values()))]
    console().print(plain_table((name, *columns), rows, numbers=range(1, len(columns) + 1)))


def _show(found: Mapping[str, Mapping[str, Mapping[str, float]]], runs: Sequence[str], out_folder: str | None) -> None:
    """Print a table per analysis, with one row per run, and the folders with all tables and figures."""
    from fedflat.console import console, plain_table, tell
    from fedflat.studies.study import STUDIES

    out = console()
    for name, rows in found.items():
        columns = list(next(iter(rows.values())))
        table = [(run, *(_cell(values[column]) for column in columns)) for run, values in rows.items()]
        out.print(plain_table((name, *columns), table, numbers=range(1, len(columns) + 1)))
    if out_folder:
        tell(f"tables and figures: {out_folder}")
        return
    together = all(STUDIES[name].runs > 1 for name in found)
    for run in runs[:1] if together else runs:
        tell(f"tables and figures: {run}/analysis")
