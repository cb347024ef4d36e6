"""The command line: `fedflat` and one of `COMMANDS`. Heavy things are imported when needed.

A command is a module of `fedflat.commands` with `configure(parser)` and `execute(arguments) -> exit status`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedflat.commands.parser import Parser, add_common
from fedflat.errors import ClientError, FedflatError, InputError, InterruptedRunError, UnknownNameError, one_line


class Command(NamedTuple):
    """Where a command lives, and what it is for in one line."""

    module: str
    about: str


COMMANDS = {
    "run": Command("run", "run an experiment, or go on with one that was interrupted"),
    "presets": Command("presets", "the papers' set-ups, for `fedflat run --preset`"),
    "reproduce": Command("reproduce", "run the cells of a paper's table, and print ours beside the paper's"),
    "sweep": Command("sweep", "search for good values of fields and methods (extra: sweep)"),
    "deploy": Command("deploy", "write a Flower project that trains across machines (extra: flower)"),
    "list": Command("listing", "list the methods, models, data sets or partitions there are"),
    "data": Command("data", "locate, fetch and look at data sets and how they are divided"),
    "cost": Command("cost", "what methods cost a client: operations, stored parameters, memory, time"),
    "analyze": Command("analyze", "look at finished runs: curvature, landscapes, robustness, calibration"),
    "show": Command("show", "table and curves of runs, finished or not, in the terminal"),
    "report": Command("report", "one HTML page about runs: results, flatness, clients, cost; also while they go on"),
    "compare": Command("compare", "runs beside each other: spread over seeds, significance, rounds to targets, cost"),
}
EXAMPLES = """\
examples:
  fedflat run --data digits --model mlp --clients 20 --rounds 50
  fedflat run experiment.toml --seed 0..2 --method "fedavg,fedavg+asam"
  fedflat run --preset s003_c10 --method fedavg+asam --rounds 300
  fedflat reproduce 004/table1 --scale small
  fedflat sweep --data digits --model mlp --search "lr=log(0.01,1)" --trials 20
  fedflat deploy init federation --preset s003_c10 --clients 10
  fedflat list methods
  fedflat data cifar10 --fetch
  fedflat cost --model resnet56 --methods fedavg,moon,fedalign
  fedflat analyze runs/* --what curvature,landscape
  fedflat show runs/*
  fedflat report runs/* --open
  fedflat compare runs/* --target 0.5,0.6 --markdown

`fedflat COMMAND --help` explains a command. Exit status: 0, 1 (the run failed), 2 (bad input), 130 (interrupted)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. argv: the arguments, those of the process by default."""
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given
    _tolerate_narrow_encodings()
    try:
        with warnings_shown():
            return _dispatch([word for word in given if word != "--debug"])
    except SystemExit as end:  # argparse after --help; rich when the reader of a pipe, such as `head`, has gone
        return end.code if isinstance(end.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, (InterruptedRunError, KeyboardInterrupt)):
            traceback.print_exc()
        status, line = describe(error)
        sys.stderr.write(f"fedflat: {line}\n")
        return status


def _dispatch(words: list[str]) -> int:
    parser = _top_parser()
    if words and not words[0].startswith("-"):
        name, *rest = words
        if name not in COMMANDS:
            raise UnknownNameError("command", name, COMMANDS)
        command = importlib.import_module(f"fedflat.commands.{COMMANDS[name].module}")
        own = Parser(prog=f"fedflat {name}", description=command.__doc__)
        command.configure(own)
        add_common(own)
        arguments = own.parse(rest)
        for module in arguments.modules:
            _import(module)
        status: int = command.execute(arguments)
        return status
    if parser.parse(words).version:
        from importlib.metadata import version

        sys.stdout.write(f"fedflat {version('fedflat')}\n")
        return 0
    parser.print_help(sys.stderr)
    return 2


def _import(name: str) -> None:
    """Let a module of the user's register its parts; it may lie in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(name.removesuffix(".py"))
    except Exception as error:
        raise InputError(f"--import {name}: {type(error).__name__}: {error}") from error


def _top_parser() -> Parser:
    commands = "\n".join(f"  {name:9} {command.about}" for name, command in COMMANDS.items())
    about = "Federated learning that generalises: every method a sum of small parts.\n\ncommands:\n" + commands
    parser = Parser(prog="fedflat", usage="fedflat COMMAND …", description=about, epilog=EXAMPLES)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    return parser


def describe(error: BaseException) -> tuple[int, str]:
    """Exit status and one line for an error that reached the top."""
    text = one_line(error)
    if isinstance(error, (InterruptedRunError, KeyboardInterrupt)):
        return 130, text or "interrupted"
    if isinstance(error, InputError):
        return 2, f"error: {text}"
    if isinstance(error, ClientError):
        return 1, f"error: {text} (--debug shows the traceback)"
    if isinstance(error, FedflatError):
        return 1, f"error: {text}"
    if isinstance(error, OSError):
        return 1, f"error: {error}"
    return 1, f"error: unexpected {type(error).__name__}: {text} (a bug in fedflat? --debug shows the traceback)"


class _Lines(logging.Handler):
    """One line a message, to wherever stderr leads at that moment (a live display may have taken it over)."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        text = " ".join(record.getMessage().split())
        sys.stderr.write(f"fedflat: {record.levelname.lower()}: {text}\n")


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Show the library's warnings on stderr, one line each."""
    logger, handler = logging.getLogger("fedflat"), _Lines(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _tolerate_narrow_encodings() -> None:
    """Where a terminal cannot show a character, show a question mark rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
