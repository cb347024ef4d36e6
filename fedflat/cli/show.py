"""Show a table and curves of runs in the terminal. The runs need not be finished."""

from __future__ import annotations

import argparse

from fedflat.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that contain them")
    parser.add_argument("--png", metavar="FILE.png", help="also write the curves to an image file")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table and the curves."""
    from fedflat.console import console, tell
    from fedflat.report.terminal import charts, runs_table
    from fedflat.runs.records import records_of

    records, out = records_of(arguments.runs), console()
    out.print(runs_table(records))
    out.print(charts(records, out.width))
    if arguments.png:
        from fedflat.report.figures import curves

        tell(f"picture: {curves(records, arguments.png)}")
    return 0
