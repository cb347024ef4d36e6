"""Run experiments. Their fields come from a preset, a TOML file and options; options win, then the file.

An option with several values, such as --lr 0.01,0.1 or --seed 0..2, makes a grid, run one after another in folders of
their own. Running the same command again goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.calls import split
from fedflat.commands.callbacks import add_callbacks, callbacks_of, track_finished
from fedflat.commands.parser import Parser, add_data_root
from fedflat.errors import InputError
from fedflat.experiment import Experiment, check_names, field_type, read_toml
from fedflat.grid import combinations
from fedflat.naming import default_out

if TYPE_CHECKING:
    from fedflat.callbacks import Callback
    from fedflat.report.progress import Watcher
    from fedflat.result import Run
    from fedflat.series import Member

GROUPS = {  # by the field that opens the group
    "data": "data and clients",
    "model": "model and method",
    "rounds": "training",
    "server_lr": "server and evaluation",
    "head": "names inside the model",
    "dtype": "numbers and machine",
}
METAVARS: dict[type, str] = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}
RAY = "of --backend ray: a cluster's address, 'auto' or 'local'; else $RAY_ADDRESS or a cluster of this run's own"
WATCH = "what else to record: drift, gsnr, client_curvature, feature_norms, interference, with commas between them"


def configure(parser: Parser) -> None:
    """Add a positional file, the options of the command and one option for every field of `Experiment`."""
    parser.usage = "fedflat run [FILE.toml] [--preset NAME] [--field value[,value …] …]"
    parser.add_argument("--watch", metavar="LIST", default="", help=WATCH)
    parser.add_argument("--watch-every", metavar="N", type=int, default=1, help="rounds between looks [1]")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=RAY)
    add_callbacks(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress and no table; print the run folder only")
    parser.add_argument(
        "--out", metavar="DIR", help="run folder, of a grid the folder of its runs; under runs/ by default"
    )
    add_data_root(parser)
    add_experiment(parser)


def add_experiment(parser: Parser) -> None:
    """Add what describes experiments: a file, a preset and the fields."""
    parser.unknown = "field"
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="fields of the experiment")
    parser.add_argument("--preset", metavar="NAME", default="", help="a set-up of a paper; see `fedflat presets`")
    group: Any = parser
    for spec in fields(Experiment):
        if spec.name in GROUPS:
            group = parser.add_argument_group(GROUPS[spec.name])
        _add_field(parser, group, spec)


def _add_field(parser: Parser, group: Any, spec: Field[Any]) -> None:
    option, (kind, _) = f"--{spec.name.replace('_', '-')}", field_type(spec.name)
    default = "none" if spec.default is None else str(spec.default).lower() if kind is bool else spec.default
    help = f"{spec.metadata['help']} [{default}]".replace("%", "%%")
    group.add_argument(option, dest=spec.name, default=argparse.SUPPRESS, metavar=METAVARS[kind], help=help)
    if kind is bool:
        parser.switches.add(option)


def experiments_of(arguments: argparse.Namespace) -> list[Experiment]:
    """The experiments that a preset, a file and options describe together; options win, then the file."""
    values = read_toml(_no_folder(arguments.file)) if arguments.file else {}
    check_names(values)
    given = {name: value for name, value in vars(arguments).items() if name in Experiment.__dataclass_fields__}
    make: Callable[..., Experiment] = Experiment
    if arguments.preset:
        from fedflat.presets import load_preset

        make = load_preset(arguments.preset).make
    return [make(**values | point) for point in combinations(given)]


def _no_folder(file: str) -> str:
    """The name of a file; of a run folder, how to go on with the run."""
    if Path(file).is_dir():
        run = Path(file, "experiment.toml")
        remedy = f"to go on with its run: fedflat run {run} --out {file}" if run.exists() else "name a TOML file"
        raise InputError(f"{file} is a folder; {remedy}")
    return file


def execute(arguments: argparse.Namespace) -> int:
    """Run what the arguments describe, show how it goes, and what came out."""
    experiments = experiments_of(arguments)
    callbacks = callbacks_of(arguments)
    prepare(experiments, arguments.data_root)
    options: dict[str, Any] = {"root": arguments.data_root, "watch_every": arguments.watch_every}
    options["ray_address"] = arguments.ray_address
    options["watch"] = split(arguments.watch)
    if len(experiments) == 1:
        return _run_one(experiments[0], arguments, options, callbacks)
    from fedflat.series import run_all, series

    options |= {"progress": not arguments.quiet, "callbacks": lambda: callbacks_of(arguments)}
    members = run_all(series(experiments, arguments.out or "runs", arguments.preset), **options)
    if arguments.quiet:
        sys.stdout.write("".join(f"{member.folder}\n" for member in members))
    else:
        _show_all(members)
    return report_failures(members)


def prepare(experiments: Sequence[Experiment], root: str | None) -> None:
    """Tell a wrong name at once, and fetch the data that are not there yet."""
    from fedflat.assembly import check_spelling
    from fedflat.calls import parse
    from fedflat.commands.data import fetch_shown

    for experiment in experiments:
        check_spelling(experiment)
    for name in dict.fromkeys(parse(experiment.data).name for experiment in experiments):
        fetch_shown(name, root)


def _run_one(
    experiment: Experiment, arguments: argparse.Namespace, options: dict[str, Any], callbacks: Sequence[Callback]
) -> int:
    from fedflat.runner import run

    options |= {"out": Path(arguments.out) if arguments.out else default_out(experiment), "progress": False}
    options["preset"] = arguments.preset
    if arguments.quiet:
        track_finished(run(experiment, callbacks=callbacks, **options), callbacks)
        sys.stdout.write(f"{options['out']}\n")
        return 0
    from fedflat.report.progress import Heading, Progress

    heading = Heading()
    result = run(experiment, callbacks=[heading, *callbacks, Progress()], **options)
    track_finished(result, callbacks)
    _conclude(result, heading)
    return 0


def _show_all(members: Sequence[Member]) -> None:
    """The table of all runs of a grid that have begun."""
    from fedflat.report.records import records_of
    from fedflat.report.terminal import console, runs_table, say, shown_path

    begun = [member.folder for member in members if (member.folder / "experiment.toml").exists()]
    if begun:
        console().print(runs_table(records_of(begun)))
    folder = shown_path(members[0].folder.parent)
    say(f"{len(begun)} runs in {folder}; means over their seeds: fedflat compare {folder}")


def report_failures(members: Sequence[Member]) -> int:
    """Say what failed, one line each; returns the exit status."""
    from fedflat.report.terminal import say

    failed = [member for member in members if member.failure]
    for member in failed:
        say(f"failed: {member.folder}: {member.failure}")
    return 1 if failed else 0


def _conclude(result: Run, heading: Watcher) -> None:
    """The table of what came out; a run that was found finished was never watched."""
    from fedflat.report.records import record_of
    from fedflat.report.terminal import console, result_table, say

    if not heading.seen:
        say(f"{result.out} holds this run, finished already; nothing was left to do")
    if result.status == "stopped":
        say(f"stopped after round {len(result.metrics)}: {result.stopped}; it goes on without --stop-at and --patience")
    console().print(result_table(record_of(result)))
