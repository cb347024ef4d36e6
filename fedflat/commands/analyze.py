"""Look at finished runs: curvature, landscapes, robustness, calibration; tables and figures go into the run folders.

Analyses of one run are made of each; `interpolation` takes two runs and `plane` three, together.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedflat.calls import split
from fedflat.commands.parser import Parser, add_data_root

WHAT = "curvature,landscape"


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders of them")
    parser.add_argument("--what", metavar="LIST", default=WHAT, help=f"analyses, with commas between them [{WHAT}]")
    parser.add_argument("--list", action="store_true", help="list the analyses there are")
    add_data_root(parser)
    parser.add_argument("--samples", metavar="N", type=int, default=2000, help="samples to look at [2000]")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the samples and random directions [0]")
    parser.add_argument("--workers", metavar="N", type=int, default=0, help="processes; 0 is one per core [0]")
    about = "memory for activations; more makes curvature faster [2]"
    parser.add_argument("--memory", metavar="GIB", type=float, default=2.0, help=about)


def execute(arguments: argparse.Namespace) -> int:
    """Analyse, and compare the runs."""
    from fedflat.analysis.study import study
    from fedflat.errors import InputError
    from fedflat.report.records import expand

    if arguments.list:
        return _list_studies()
    if not arguments.runs:
        raise InputError("name the run folders to look at, such as runs/first (--list shows the analyses)")
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
    )
    _show(found, runs)
    return 0


def _list_studies() -> int:
    from fedflat.analysis.study import STUDIES
    from fedflat.report.terminal import console, plain_table

    console().print(plain_table(("analysis", "about"), [(name, each.about) for name, each in STUDIES.items()]))
    return 0


def _cell(value: float) -> str:
    """Four digits; a dash where there is nothing to tell."""
    return "–" if math.isnan(value) else f"{value:.4g}"


def _show(found: Mapping[str, Mapping[str, Mapping[str, float]]], runs: Sequence[str]) -> None:
    """A table of each analysis, one row a run, and where the rest is."""
    from fedflat.analysis.study import STUDIES
    from fedflat.report.terminal import console, plain_table, tell

    out = console()
    for name, rows in found.items():
        figures = list(next(iter(rows.values())))
        table = [(run, *(_cell(values[figure]) for figure in figures)) for run, values in rows.items()]
        out.print(plain_table((name, *figures), table, numbers=range(1, len(figures) + 1)))
    together = all(STUDIES[name].runs > 1 for name in found)
    for run in runs[:1] if together else runs:
        tell(f"tables and figures: {run}/analysis")
