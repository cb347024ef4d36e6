"""Two methods on the embedded digits, side by side: FedAvg, and FedAvg with ASAM and SWA.

Forty clients hold two classes each, and four train in a round. The parts' hyper-parameters are their defaults. This is
one seed of one small set-up, chosen to be quick and uneven: it shows how the tool works, not which method is better.

    python examples/demo.py [--rounds 200] [--out runs/demo]

Run it again to go on after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedflat import FedflatError
from fedflat.cli import describe, warnings_shown
from fedflat.commands.run import default_out
from fedflat.experiment import Experiment
from fedflat.report.figures import curves
from fedflat.report.progress import Board
from fedflat.report.records import read_records
from fedflat.report.terminal import charts, console, runs_table, say, shown_path
from fedflat.runner import run

METHODS = ("fedavg", "fedavg+asam+swa")
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
    folders = run_all([e.replace(method=method) for method in METHODS], arguments.out)
    show(folders, arguments.out / "curves.png")


def run_all(experiments: list[Experiment], out: Path) -> list[Path]:
    """Run each in a folder of its own, all on one board."""
    folders = [out / default_out(experiment).name for experiment in experiments]
    with Board() as board:
        watchers = [board.watch(e.method, e.rounds) for e in experiments]
        for experiment, folder, watcher in zip(experiments, folders, watchers, strict=True):
            result = run(experiment, out=folder, progress=False, callbacks=[watcher])
            if not watcher.seen:  # a run that had ended already
                watcher.start(result)
    return folders


def show(folders: list[Path], picture: Path) -> None:
    """The table, the curves here and as a picture, and where everything is."""
    records, out = read_records(folders), console()
    out.print(runs_table(records))
    out.print(charts(records, out.width))
    curves(records, picture)
    out.print("\nwritten:", style="bold")
    for path in (*folders, picture):
        out.print(f"  {shown_path(path)}{'/' if path.is_dir() else ''}", soft_wrap=True, markup=False)
    out.print(f"look again with: fedflat show {shown_path(picture.parent)}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        with warnings_shown():
            main()
    except (FedflatError, KeyboardInterrupt) as error:
        status, line = describe(error)
        say(f"demo: {line}")
        sys.exit(status)
