"""Compare runs in a table: mean ± deviation over seeds, rounds to targets, worst clients, cost, significance.

Runs that differ only in the seed make one row. A significance test compares every row with the baseline in the same
setting. The runs need not be finished.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fedflat.cli.parser import Parser
from fedflat.errors import InputError
from fedflat.experiment import check_names
from fedflat.specs import split


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, or folders that contain them; the baseline first"
    )
    parser.add_argument("--by", metavar="LIST", default="", help="group the runs by these fields, separated by commas")
    parser.add_argument("--metric", metavar="NAME", default="", help="what to compare [the leading metric of the task]")
    parser.add_argument("--baseline", metavar="METHOD", default="", help="test against this method [the first run's]")
    pivot = "show methods in rows and these fields in columns, such as partition, with ranks over them"
    parser.add_argument("--columns", metavar="LIST", default="", help=pivot)
    parser.add_argument("--ranks", metavar="FILE.png", help="with --columns: draw ranks and the critical difference")
    parser.add_argument("--holm", action="store_true", help="correct p-values for their number, by Holm's method")
    parser.add_argument("--sort", action="store_true", help="best row first")
    targets = "count the rounds until the metric reaches these values, such as 0.5,0.6"
    parser.add_argument("--target", metavar="LIST", default="", help=targets)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="print a LaTeX table, which needs the package booktabs")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--csv", action="store_true", help="print comma-separated values with all digits")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from fedflat.console import console, tell
    from fedflat.report.compare import compare
    from fedflat.report.pivot import pivot

    if arguments.ranks and not arguments.columns:
        raise InputError("--ranks draws ranks over settings: name the settings with --columns, such as partition")
    found: Any = compare(
        arguments.runs,
        by=arguments.by,
        metric=arguments.metric,
        targets=[_number(word) for word in split(arguments.target)],
        baseline=arguments.baseline,
        holm=arguments.holm,
        ordered=arguments.sort,
    )
    if arguments.columns:
        check_names(dict.fromkeys(split(arguments.columns)))
        found = pivot(arguments.runs, split(arguments.columns), arguments.metric)
        if arguments.ranks:
            tell(f"picture: {found.plot(arguments.ranks)}")
    for form in ("latex", "markdown", "csv"):
        if getattr(arguments, form):
            sys.stdout.write(getattr(found, form)())
            return 0
    out = console()
    out.print(*found.tables(out.width), sep="\n")
    for note in found.notes:
        out.print(note, style="dim", markup=False)
    return 0


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(f"--target takes numbers separated by commas, such as 0.5,0.6, not {word!r}") from None
