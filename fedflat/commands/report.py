"""Write one HTML file about runs that needs nothing else to be read: results, flatness, clients, cost.

Runs that differ in nothing but the seed are shown as one. A folder of runs stands for all the runs in it; they need not
be finished. What `fedflat analyze` and `fedflat run --watch` left in the folders is shown as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedflat.commands.parser import Parser

WATCH = "write it again while runs go on, until all have ended; of a grid, those to come as well"


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", metavar="FILE.html", default="report.html", help="where to write it [report.html]")
    parser.add_argument("--title", metavar="TEXT", default="", help="its title, instead of the methods' names")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--watch", action="store_true", help=WATCH)


def execute(arguments: argparse.Namespace) -> int:
    """Write the file, show it, keep it up to date."""
    from fedflat.report.html import report
    from fedflat.report.watch import follow

    def begun(path: Path) -> None:
        _present(path, arguments.open)

    if arguments.watch:
        follow(arguments.runs, arguments.out, begun, arguments.title)
    else:
        begun(report(arguments.runs, arguments.out, arguments.title))
    return 0


def _present(path: Path, show: bool) -> None:
    import webbrowser

    from fedflat.report.terminal import tell

    tell(f"report: {path}")
    if show:
        webbrowser.open(path.absolute().as_uri())
