"""Put runs beside each other: mean ± deviation over seeds, rounds to targets, worst clients, cost, significance.

Runs that differ in nothing but the seed make one row; the rows are tested against the first. A folder of runs stands
for all the runs in it. They need not be finished.
"""

from __future__ import annotations

import argparse
import sys

from fedflat.calls import split
from fedflat.commands.parser import Parser
from fedflat.errors import InputError


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; those of the first row first")
    parser.add_argument("--by", metavar="LIST", default="", help="fields to group by, with commas between them")
    parser.add_argument("--metric", metavar="NAME", default="accuracy", help="what to compare [accuracy]")
    parser.add_argument("--target", metavar="LIST", default="", help="values to count the rounds to, such as 0.5,0.6")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="a LaTeX table that needs the package booktabs")
    form.add_argument("--markdown", action="store_true", help="a table for GitHub's Markdown")
    form.add_argument("--csv", action="store_true", help="comma-separated values with all digits")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from fedflat.report.compare import compare
    from fedflat.report.terminal import console

    found = compare(
        arguments.runs,
        by=arguments.by,
        metric=arguments.metric,
        targets=[_number(word) for word in split(arguments.target)],
    )
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
        raise InputError(f"--target takes numbers with commas between them, such as 0.5,0.6, not {word!r}") from None
