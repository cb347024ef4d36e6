"""Run an experiment. Its fields come from a TOML file, from options, or both; an option wins.

Running the same command again goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.commands.parser import Parser
from fedflat.experiment import Experiment, check_names, coerce, field_type, read_toml

if TYPE_CHECKING:
    from fedflat.report.progress import Watcher
    from fedflat.result import Run

GROUPS = {  # by the field that opens the group
    "data": "data and clients",
    "model": "model and method",
    "rounds": "training",
    "server_lr": "server and evaluation",
    "head": "names inside the model",
    "dtype": "numbers and machine",
}
METAVARS: dict[type, str] = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}
WATCH = "what else to record: drift, gsnr, client_curvature, feature_norms, interference, with commas between them"
IRRELEVANT = ("workers", "backend")  # fields that do not change the result


def configure(parser: Parser) -> None:
    """Add a positional file, the options of the command and one option for every field of `Experiment`."""
    parser.unknown, parser.usage = "field", "fedflat run [FILE.toml] [--field value …]"
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="fields of the experiment")
    parser.add_argument("--out", metavar="DIR", help="run folder; named after the experiment, under runs/, by default")
    parser.add_argument("--data-root", metavar="DIR", help="where data sets lie; else $FEDFLAT_DATA or a cache folder")
    parser.add_argument("--watch", metavar="LIST", default="", help=WATCH)
    parser.add_argument("--watch-every", metavar="N", type=int, default=1, help="rounds between looks [1]")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table; print the run folder only")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
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


def experiment_of(arguments: argparse.Namespace) -> Experiment:
    """The experiment that a file and options describe together; options win."""
    values = read_toml(arguments.file) if arguments.file else {}
    check_names(values)
    given = {name: value for name, value in vars(arguments).items() if name in Experiment.__dataclass_fields__}
    return Experiment.from_dict(values | {name: coerce(name, value) for name, value in given.items()})


def default_out(experiment: Experiment) -> Path:
    """A readable folder under `runs/` that belongs to this experiment alone.

    It ends in a hash of the fields that differ from their defaults; those that cannot change a result are left out.
    """
    changed = {
        spec.name: getattr(experiment, spec.name)
        for spec in fields(experiment)
        if spec.name not in IRRELEVANT and getattr(experiment, spec.name) != spec.default
    }
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]
    return Path("runs") / f"{slug(experiment.method)}-{slug(experiment.data)}-s{experiment.seed}-{digest}"


def slug(text: str) -> str:
    """Text as part of a file name: `"feddc(alpha=0.01)+man"` becomes `"feddc-alpha0.01-man"`."""
    return re.sub(r"[^\w.]+", "-", text.replace("=", "")).strip("-.")[:48]


def execute(arguments: argparse.Namespace) -> int:
    """Run it, show how it goes, and what came out."""
    experiment = experiment_of(arguments)
    out = Path(arguments.out) if arguments.out else default_out(experiment)
    from fedflat.assembly import check_spelling
    from fedflat.calls import parse
    from fedflat.commands.data import fetch_shown
    from fedflat.runner import run

    check_spelling(experiment)
    fetch_shown(parse(experiment.data).name, arguments.data_root)
    options: dict[str, Any] = {"out": out, "root": arguments.data_root, "progress": False}
    options["watch"] = [name.strip() for name in arguments.watch.split(",") if name.strip()]
    options["watch_every"] = arguments.watch_every
    if arguments.quiet:
        run(experiment, **options)
        sys.stdout.write(f"{out}\n")
        return 0
    from fedflat.report.progress import Heading, Progress

    heading = Heading()
    _conclude(run(experiment, callbacks=[heading, Progress()], **options), heading)
    return 0


def _conclude(result: Run, heading: Watcher) -> None:
    """The table of what came out; a run that was found finished was never watched."""
    from fedflat.report.records import record_of
    from fedflat.report.terminal import console, result_table, say

    if not heading.seen:
        say(f"{result.out} holds this run, finished already; nothing was left to do")
    console().print(result_table(record_of(result)))
