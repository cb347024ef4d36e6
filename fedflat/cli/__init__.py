"""The command line: `fedflat COMMAND`, with one of `COMMANDS`.

A command is a module of `fedflat.cli` with `configure(parser)` and `execute(arguments) -> exit status`. Its docstring
is the text of `--help`. Slow modules such as torch are imported only where they are needed.
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

from fedflat.cli.parser import Parser, add_common
from fedflat.cli.user_code import imported
from fedflat.errors import ClientError, FedflatError, InputError, InterruptedRunError, UnknownNameError, one_line
from fedflat.words import printable


class Command(NamedTuple):
    """The module of a command, and its purpose in one line."""

    module: str
    about: str


COMMANDS = {
    "demo": Command("demo", "run three methods on embedded data and write a report, in about a minute"),
    "run": Command("run", "run one or several experiments, or continue interrupted ones"),
    "presets": Command("presets", "list the settings of the papers, for `fedflat run --preset`"),
    "reproduce": Command("reproduce", "run the experiments of a paper's table and print both results side by side"),
    "leaderboard": Command("leaderboard", "rank every method under one set-up, each tuned by the same small search"),
    "sweep": Command("sweep", "search for good hyperparameters (needs the extra `sweep`)"),
    "deploy": Command("deploy", "write a Flower project that trains on several machines (needs the extra `flower`)"),
    "list": Command("listing", "list the available methods, models, data sets, partitions or optimisers"),
    "data": Command("data", "find or download data sets, and show how they are divided among clients"),
    "cost": Command("cost", "measure what methods cost per client: operations, parameters, memory, time"),
    "analyze": Command("analyze", "analyse finished runs: curvature, landscapes, robustness, calibration"),
    "show": Command("show", "show a table and curves of runs in the terminal, finished or not"),
    "report": Command("report", "write an HTML page about runs: results, flatness, clients, cost"),
    "compare": Command("compare", "compare runs: mean over seeds, significance, rounds to targets, cost"),
}
EXAMPLES = """\
examples:
  fedflat demo
  fedflat run --data digits --model mlp --clients 20 --rounds 50
  fedflat run experiment.toml --seed 0..2 --method "fedavg,fedavg+asam"
  fedflat run --preset s003_c10 --method fedavg+asam --rounds 300
  fedflat reproduce 004/table1 --scale small
  fedflat leaderboard benchmarks/leaderboard.toml --add "scaffold+sam"
  fedflat sweep --data digits --model mlp --search "lr=log(0.01,1)" --trials 20
  fedflat deploy init federation --preset s003_c10 --clients 10
  fedflat list methods
  fedflat data cifar10 --fetch
  fedflat cost --model resnet56 --methods fedavg,moon,fedalign
  fedflat analyze runs/* --what curvature,landscape
  fedflat show runs/*
  fedflat report runs/* --open
  fedflat compare runs/* --target 0.5,0.6 --markdown

`fedflat COMMAND --help` explains a command.
Exit status: 0 (success), 1 (the run failed), 2 (bad input), 130 (interrupted)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments `argv`, by default those of the process. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given
    _tolerate_narrow_encodings()
    try:
        with warnings_shown():
            return _dispatch([word for word in given if word != "--debug"])
    except SystemExit as end:  # argparse after --help; rich when a reader such as `head` has closed the pipe
        return end.code if isinstance(end.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, (InterruptedRunError, KeyboardInterrupt)):
            traceback.print_exc()
        status, line = describe(error)
        sys.stderr.write(f"fedflat: {printable(line)}\n")
        return status


def _dispatch(words: list[str]) -> int:
    parser = _top_parser()
    if words and not words[0].startswith("-"):
        name, *rest = words
        if name not in COMMANDS:
            raise UnknownNameError("command", name, COMMANDS)
        command = importlib.import_module(f"fedflat.cli.{COMMANDS[name].module}")
        own = Parser(prog=f"fedflat {name}", description=command.__doc__)
        command.configure(own)
        add_common(own)
        arguments = own.parse(rest)
        for module in arguments.modules:
            imported("--import", module)
        status: int = command.execute(arguments)
        return status
    if parser.parse(words).version:
        from importlib.metadata import version

        sys.stdout.write(f"fedflat {version('fedflat')}\n")
        return 0
    parser.print_help(sys.stderr)
    return 2


def _top_parser() -> Parser:
    commands = "\n".join(f"  {name:11} {command.about}" for name, command in COMMANDS.items())
    about = "Federated learning that generalises: every method is a sum of small parts.\n\ncommands:\n" + commands
    parser = Parser(prog="fedflat", usage="fedflat COMMAND …", description=about, epilog=EXAMPLES)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    return parser


def describe(error: BaseException) -> tuple[int, str]:
    """The exit status and one line of text for an error that no command handled."""
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
    if isinstance(error, MemoryError) or ("alloc" in text and "memory" in text):  # NumPy and PyTorch say how much
        return 1, f"error: there is not enough memory{_asker(error)}: {text or 'Python wanted more than there is'}"
    return 1, f"error: unexpected {type(error).__name__}: {text} (a bug in fedflat? --debug shows the traceback)"


def _asker(error: BaseException) -> str:
    """Which function of the package wanted what it did not get."""
    home = Path(__file__).resolve().parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(home)]
    if not own:
        return ""
    module = Path(own[-1].filename).resolve().relative_to(home.parent).with_suffix("")
    return f" for {own[-1].name}() in {'.'.join(module.parts)}"


CHOOSERS = ("fedflat.engine.stacking",)  # `stack="auto"`


class _Lines(logging.Handler):
    """Writes one line per message to the current `sys.stderr`, which a live display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        text, kind = " ".join(record.getMessage().split()), record.levelname.lower()
        sys.stderr.write(f"fedflat: {'' if kind == 'info' else f'{kind}: '}{printable(text)}\n")

    def filter(self, record: logging.LogRecord) -> bool:
        """Warnings and errors, and what somebody has chosen for the user."""
        return record.levelno >= logging.WARNING or (record.levelno == logging.INFO and record.name in CHOOSERS)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Show the library's warnings on stderr, one line each, and what it chose where the user left it open."""
    logger, handler = logging.getLogger("fedflat"), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _tolerate_narrow_encodings() -> None:
    """Write a question mark for a character that the terminal cannot show, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
