"""Three methods on the embedded digits, side by side: FedAvg, FedAvg with ASAM and SWA, FedAvg with constraints.

Forty clients hold two classes each, and four train in a round. The parts' hyper-parameters are their defaults. This is
one seed of one small set-up, chosen to be quick and uneven: it shows how the tool works, not which method is better.

    python examples/demo.py [--rounds 200] [--out runs/demo]

It runs the methods, looks at how flat their minima are, and writes a report to open in a browser. Run it again to go on
after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedflat import Experiment, FedflatError
from fedflat.cli import describe, warnings_shown
from fedflat.console import console, say, shown_path
from fedflat.report.html import report
from fedflat.report.terminal import charts, runs_table
from fedflat.runs.records import records_of
from fedflat.runs.series import run_all, series
from fedflat.studies.study import study

METHODS = ("fedavg", "fedavg+asam+swa", "fedavg+const")
LOOK_AT = ("curvature", "density", "landscape")
SETTING = Experiment(
    data="digits",
    partition="pathological(labels=2)",
    clients=40,
    participation="uniform(4)",
    model="mlp",
    rounds=200,
    local_epochs=2,
    batch_size=10,
    lr=0.05,
    lr_decay=1.0,
    weight_decay=4e-4,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=SETTING.rounds)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    e = SETTING.replace(rounds=arguments.rounds)
    say(f"{e.data}, {e.partition}, {e.clients} clients, {e.participation} a round, {e.model}, {e.rounds} rounds\n")
    members = run_all(series([e.replace(method=method) for method in METHODS], arguments.out))
    folders = [member.folder for member in members]
    say(f"looking at the minima: {', '.join(LOOK_AT)}")
    study(folders, LOOK_AT, samples=600, workers=0, progress=sys.stderr.isatty())
    show(folders, report(folders, arguments.out / "report.html", title="fedflat demo: three methods on the digits"))


def show(folders: list[Path], page: Path) -> None:
    """The table, the curves, and where everything is."""
    records, out = records_of(folders), console()
    out.print(runs_table(records))
    out.print(charts(records, out.width))
    out.print(f"look again with: fedflat show {shown_path(page.parent)}", soft_wrap=True, markup=False)
    out.print(f"report, to open in a browser: {shown_path(page)}", style="bold", soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        with warnings_shown():
            main()
    except (FedflatError, KeyboardInterrupt) as error:
        status, line = describe(error)
        say(f"demo: {line}")
        sys.exit(status)
