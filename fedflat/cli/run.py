"""Run one or several experiments.

The fields of an experiment come from options, a TOML file and a preset. Options override the file, and the file
overrides the preset. An option with several values, such as --lr 0.01,0.1 or --seed 0..2, makes a grid of experiments,
which run one after another, each in its own folder. If a run was interrupted, the same command continues it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.cli.callbacks import add_callbacks, callbacks_of, metrics_needed, track_finished
from fedflat.cli.experiments import add_experiment, experiments_of, prepare, report_failures
from fedflat.cli.parser import Parser, add_data_root, add_metrics
from fedflat.experiment import Experiment, default_out
from fedflat.specs import split

if TYPE_CHECKING:
    from fedflat.runs.callbacks import Callback
    from fedflat.runs.display import Watcher
    from fedflat.runs.result import Run
    from fedflat.runs.series import Member

RAY = "for --backend ray: address of a cluster, 'auto' or 'local' [$RAY_ADDRESS, else a new cluster for this run]"
WATCH = (
    "what else to record, separated by commas: drift, gsnr, gsnr_first, epoch_norms, client_curvature, feature_norms, "
    "global_feature_norms, global_curvature, interference"
)


def configure(parser: Parser) -> None:
    """Add the options of the command and those that describe experiments."""
    parser.usage = "fedflat run [FILE.toml] [--preset NAME] [--field value[,value …] …]"
    add_metrics(parser)
    parser.add_argument("--watch", metavar="LIST", default="", help=WATCH)
    parser.add_argument("--watch-every", metavar="N", type=int, default=1, help="record it in every N-th round [1]")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=RAY)
    add_callbacks(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress and no table; print only the run folder")
    about = "the run folder, or the folder for all runs of a grid [a new folder in runs/, or runs/]"
    parser.add_argument("--out", metavar="DIR", help=about)
    add_data_root(parser)
    add_experiment(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Run the experiments, and show the progress and the results."""
    experiments = experiments_of(arguments)
    callbacks = callbacks_of(arguments)
    experiments = prepare(experiments, arguments.data_root)
    options: dict[str, Any] = {"root": arguments.data_root, "watch_every": arguments.watch_every}
    options["ray_address"] = arguments.ray_address
    options |= {"watch": split(arguments.watch), "metrics": arguments.metrics}
    if len(experiments) == 1:
        return _run_one(experiments[0], arguments, options, callbacks)
    from fedflat.runs.series import run_all, series

    options |= {"progress": not arguments.quiet, "callbacks": lambda: callbacks_of(arguments)}
    options["needed"] = metrics_needed(callbacks)
    members = run_all(series(experiments, arguments.out or "runs", arguments.preset), **options)
    if arguments.quiet:
        sys.stdout.write("".join(f"{member.folder}\n" for member in members))
    else:
        _show_all(members)
    return report_failures(members)


def _run_one(
    experiment: Experiment, arguments: argparse.Namespace, options: dict[str, Any], callbacks: Sequence[Callback]
) -> int:
    from fedflat.runs.runner import run

    options |= {"out": Path(arguments.out) if arguments.out else default_out(experiment), "progress": False}
    options["preset"] = arguments.preset
    if arguments.quiet:
        track_finished(run(experiment, callbacks=callbacks, **options), callbacks)
        sys.stdout.write(f"{options['out']}\n")
        return 0
    from fedflat.runs.display import Heading, Progress

    heading = Heading()
    result = run(experiment, callbacks=[heading, *callbacks, Progress()], **options)
    track_finished(result, callbacks)
    _conclude(result, heading)
    return 0


def _show_all(members: Sequence[Member]) -> None:
    """Show a table of all runs of a grid that were started."""
    from fedflat.console import console, say, shown_path
    from fedflat.report.terminal import runs_table
    from fedflat.runs.records import records_of

    begun = [member.folder for member in members if (member.folder / "experiment.toml").exists()]
    if begun:
        console().print(runs_table(records_of(begun)))
    folder = shown_path(members[0].folder.parent)
    say(f"{len(begun)} runs in {folder}; for means over the seeds: fedflat compare {folder}")


def _conclude(result: Run, heading: Watcher) -> None:
    """Show the table of results."""
    from fedflat.console import console, say
    from fedflat.report.terminal import result_table
    from fedflat.runs.records import record_of

    if not heading.seen:
        say(f"{result.out} holds this run, finished already; there is nothing to do")
    if result.status == "stopped":
        remedy = "to continue, run it without --stop-at and --patience"
        say(f"stopped after round {len(result.metrics)}: {result.stopped}; {remedy}")
    console().print(result_table(record_of(result)))
