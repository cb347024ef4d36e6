"""Table and curves of runs in the terminal.

A folder of runs stands for all the runs in it. They need not be finished.
"""

from __future__ import annotations

import argparse

from fedflat.commands.parser import Parser


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--png", metavar="FILE.png", help="write the curves as a picture, too")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table and the curves."""
    from fedflat.report.records import records_of
    from fedflat.report.terminal import charts, console, runs_table, tell

    records, out = records_of(arguments.runs), console()
    out.print(runs_table(records))
    out.print(charts(records, out.width))
    if arguments.png:
        from fedflat.report.figures import curves

        tell(f"picture: {curves(records, arguments.png)}")
    return 0
