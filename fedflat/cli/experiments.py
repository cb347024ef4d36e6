"""What several commands share: options that describe experiments, and what to do before and after they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.cli.parser import Parser
from fedflat.errors import InputError
from fedflat.experiment import Experiment, check_names, field_type, read_toml
from fedflat.specs import combinations

if TYPE_CHECKING:
    from fedflat.runs.series import Member

GROUPS = {  # first field of a group of options → title of the group
    "data": "data and clients",
    "model": "model and method",
    "rounds": "training",
    "server_lr": "server and evaluation",
    "head": "names inside the model",
    "dtype": "numbers and machine",
}
METAVARS: dict[type, str] = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}


def add_experiment(parser: Parser) -> None:
    """Add the options that describe experiments: a file, a preset, and one option per field of `Experiment`."""
    parser.unknown = "field"
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a file with fields of the experiment")
    parser.add_argument("--preset", metavar="NAME", default="", help="the settings of a paper; see `fedflat presets`")
    group: Any = parser
    for spec in fields(Experiment):
        if spec.name in GROUPS:
            group = parser.add_argument_group(GROUPS[spec.name])
        _add_field(parser, group, spec)


def _add_field(parser: Parser, group: Any, spec: Field[Any]) -> None:
    option, (kind, _) = f"--{spec.name.replace('_', '-')}", field_type(spec.name)
    default = "none" if spec.default is None else str(spec.default).lower() if kind is bool else spec.default
    help = f"{spec.metadata['help']} [{default}]".replace("%", "%%")
    parser.add_once(group, option, dest=spec.name, default=argparse.SUPPRESS, metavar=METAVARS[kind], help=help)
    if kind is bool:
        parser.switches.add(option)


def experiments_of(arguments: argparse.Namespace) -> list[Experiment]:
    """The experiments that options, a file and a preset describe; options override the file, the file the preset."""
    values = read_toml(_no_folder(arguments.file)) if arguments.file else {}
    check_names(values)
    given = {name: value for name, value in vars(arguments).items() if name in Experiment.__dataclass_fields__}
    make: Callable[..., Experiment] = Experiment
    if arguments.preset:
        from fedflat.presets import load_preset

        make = load_preset(arguments.preset).make
    return [make(**values | point) for point in combinations(given)]


def _no_folder(file: str) -> str:
    """The file name. Raises `InputError` for a folder, which says how to continue a run in it."""
    if Path(file).is_dir():
        run = Path(file, "experiment.toml")
        remedy = f"to continue its run: fedflat run {run} --out {file}" if run.exists() else "name a TOML file"
        raise InputError(f"{file} is a folder; {remedy}")
    return file


def prepare(experiments: Sequence[Experiment], root: str | None) -> list[Experiment]:
    """Check all names, and download data sets that are not here yet; returns the experiments as they will be run."""
    from fedflat.cli.data import fetch_shown
    from fedflat.engine.assembly import check_spelling, settled
    from fedflat.specs import parse

    for experiment in experiments:
        check_spelling(experiment)
    for name in dict.fromkeys(parse(experiment.data).name for experiment in experiments):
        fetch_shown(name, root)
    return list(dict.fromkeys(map(settled, experiments)))


def report_failures(members: Sequence[Member]) -> int:
    """Write one line per failed run; returns the exit status."""
    from fedflat.console import say

    failed = [member for member in members if member.failure]
    for member in failed:
        say(f"failed: {member.folder}: {member.failure}")
    return 1 if failed else 0
