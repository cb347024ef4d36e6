"""Write one self-contained HTML page about runs: results, flatness, clients, cost.

Runs that differ only in the seed are shown as one. The runs need not be finished. The page also shows the results of
`fedflat analyze` and `fedflat run --watch`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedflat.cli.parser import Parser

WATCH = "update the page until all runs have ended, also those of a grid that have not started yet"


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that contain them")
    parser.add_argument("--out", metavar="FILE.html", default="report.html", help="the file to write [report.html]")
    parser.add_argument("--title", metavar="TEXT", default="", help="title of the page [the names of the methods]")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--watch", action="store_true", help=WATCH)
    parser.add_argument("--serve", action="store_true", help="show the page on a web server, updated while runs go on")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="with --serve: listen here [127.0.0.1]")
    parser.add_argument("--port", metavar="N", type=int, default=8765, help="with --serve: 0 takes a free one [8765]")


def execute(arguments: argparse.Namespace) -> int:
    """Write the page, open it if asked to, and keep it up to date if asked to."""
    from fedflat.report.html import report
    from fedflat.report.watch import follow

    def begun(path: Path) -> None:
        _present(path, arguments.open)

    if arguments.serve:
        return _serve(arguments)
    if arguments.watch:
        follow(arguments.runs, arguments.out, begun, arguments.title)
    else:
        begun(report(arguments.runs, arguments.out, arguments.title))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    import webbrowser

    from fedflat.console import tell
    from fedflat.report.serve import LiveReport

    live = LiveReport(arguments.runs, arguments.host, arguments.port, arguments.title)
    tell(f"live report: {live.url} (Ctrl-C ends it)")
    if arguments.open:
        webbrowser.open(live.url)
    live.run()
    return 0


def _present(path: Path, show: bool) -> None:
    import webbrowser

    from fedflat.console import tell

    tell(f"report: {path}")
    if show:
        webbrowser.open(path.absolute().as_uri())
