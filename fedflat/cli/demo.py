"""Run three methods on the embedded digits, look at how flat their minima are, and write a report.

The methods are FedAvg, FedAvg with ASAM and SWA, and FedAvg with constraints, all with their default hyperparameters.
Forty clients hold two classes each, and four train per round. This is one seed of one small set-up, chosen to be quick
and uneven: it shows how the tool works, not which method is better. Run it again to continue after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.cli.parser import Parser

if TYPE_CHECKING:
    from fedflat.experiment import Experiment

METHODS = ("fedavg", "fedavg+asam+swa", "fedavg+const")
LOOK_AT = ("curvature", "density", "landscape")


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("--rounds", metavar="N", type=int, default=200, help="rounds of each method [200]")
    parser.add_argument("--out", metavar="FOLDER", default="runs/demo", help="folder of the runs [runs/demo]")


def setting(rounds: int) -> Experiment:
    """What all three methods are run on."""
    from fedflat.experiment import Experiment

    return Experiment(
        data="digits",
        partition="pathological(labels=2)",
        clients=40,
        participation="uniform(4)",
        model="mlp",
        rounds=rounds,
        local_epochs=2,
        batch_size=10,
        lr=0.05,
        lr_decay=1.0,
        weight_decay=4e-4,
    )


def execute(arguments: argparse.Namespace) -> int:
    """Run, analyse, report, and say where everything is."""
    from fedflat.console import say
    from fedflat.report.html import report
    from fedflat.runs.series import run_all, series
    from fedflat.studies.study import study

    e, out = setting(arguments.rounds), Path(arguments.out)
    say(f"{e.data}, {e.partition}, {e.clients} clients, {e.participation} per round, {e.model}, {e.rounds} rounds\n")
    folders = [member.folder for member in run_all(series([e.replace(method=method) for method in METHODS], out))]
    say(f"looking at the minima: {', '.join(LOOK_AT)}")
    study(folders, LOOK_AT, samples=600, workers=0, progress=sys.stderr.isatty())
    _show(folders, report(folders, out / "report.html", title="fedflat demo: three methods on the digits"))
    return 0


def _show(folders: list[Path], page: Path) -> None:
    """The table, the curves, and where everything is."""
    from fedflat.console import console, shown_path
    from fedflat.report.terminal import charts, runs_table
    from fedflat.runs.records import records_of

    records, screen = records_of(folders), console()
    screen.print(runs_table(records))
    screen.print(charts(records, screen.width))
    screen.print(f"look again with: fedflat show {shown_path(page.parent)}", soft_wrap=True, markup=False)
    screen.print(f"report, to open in a browser: {shown_path(page)}", style="bold", soft_wrap=True, markup=False)
