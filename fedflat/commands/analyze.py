"""Look at finished runs: curvature, landscapes, robustness, calibration; tables and figures go into the run folders.

Analyses of one run are made of each; `interpolation` takes two runs and `plane` three, together.
"""

from __future__ import annotations

import argparse
import sys

from fedflat.commands.parser import Parser

WHAT = "curvature,landscape"


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders")
    parser.add_argument("--what", metavar="LIST", default=WHAT, help=f"analyses, with commas between them [{WHAT}]")
    parser.add_argument("--list", action="store_true", help="list the analyses there are")
    parser.add_argument("--data-root", metavar="DIR", help="where data sets lie")
    parser.add_argument("--samples", metavar="N", type=int, default=2000, help="samples to look at [2000]")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the samples and random directions [0]")
    parser.add_argument("--workers", metavar="N", type=int, default=0, help="processes; 0 is one per core [0]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def execute(arguments: argparse.Namespace) -> int:
    """Analyse, and compare the runs."""
    from fedflat.analysis.study import STUDIES, study
    from fedflat.errors import InputError
    from fedflat.report.terminal import console, plain_table

    out = console()
    if arguments.list:
        out.print(plain_table(("analysis", "about"), [(name, each.about) for name, each in STUDIES.items()]))
        return 0
    if not arguments.runs:
        raise InputError("name the run folders to look at, such as runs/first (--list shows the analyses)")
    found = study(
        arguments.runs,
        [name.strip() for name in arguments.what.split(",") if name.strip()],
        root=arguments.data_root,
        samples=arguments.samples,
        seed=arguments.seed,
        workers=arguments.workers,
        progress=sys.stderr.isatty(),
    )
    for name, rows in found.items():
        figures = list(next(iter(rows.values())))
        table = [(run, *(f"{values[figure]:.4g}" for figure in figures)) for run, values in rows.items()]
        out.print(plain_table((name, *figures), table, numbers=range(1, len(figures) + 1)))
    together = all(STUDIES[name].runs > 1 for name in found)
    for run in arguments.runs[:1] if together else arguments.runs:
        out.print(f"tables and figures: {run}/analysis", soft_wrap=True, markup=False, highlight=False)
    return 0
