"""A parser that raises `InputError` instead of ending the process, and suggests the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from fedflat.errors import InputError, UnknownNameError


class Parser(argparse.ArgumentParser):
    """`argparse` with one-line errors. Options may be written with - or _.

    Attributes:
        switches: Options that take true or false, or no value, which means true.
        unknown: The word for an option in the error about an unknown one.
    """

    def __init__(self, *, prog: str, usage: str | None = None, description: str | None, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        )
        self.switches: set[str] = set()
        self.unknown = "option"

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. Raises `InputError` if that is not possible."""
        arguments, extra = self.parse_known_args(self._spelled(words))
        for word in extra:
            if word.startswith("--"):
                name = word.split("=")[0].lstrip("-").replace("-", "_")
                raise UnknownNameError(self.unknown, name, self._names())
            raise InputError(f"unexpected {word!r}; see {self.prog} --help")
        return arguments

    def add_once(self, group: Any, option: str, **options: Any) -> None:
        """Add an option that may be given once: a second value would silently replace the first."""
        group.add_argument(option, action=_Once, **options)

    def error(self, message: str) -> NoReturn:
        """Raise an error of argparse as `InputError`."""
        raise InputError(f"{message}; see {self.prog} --help")

    def _names(self) -> list[str]:
        options = [option for option in self._option_string_actions if option.startswith("--")]
        return sorted({option.lstrip("-").replace("-", "_") for option in options})

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """The words, with options written as argparse knows them and switches as --name=value."""
        out: list[str] = []
        for word in words:
            if out and out[-1] in self.switches:
                if word.lower() in ("true", "false"):
                    out[-1] += f"={word}"
                    continue
                out[-1] += "=true"
            name, equals, value = word.partition("=")
            out.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
        if out and out[-1] in self.switches:
            out[-1] += "=true"
        return out


class _Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if self.dest in namespace:
            raise InputError(f"{option} is given twice; for several values write {option} A,B")
        setattr(namespace, self.dest, values)


def add_data_root(parser: Parser) -> None:
    """Add --data-root."""
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets [$FEDFLAT_DATA or a cache folder]")


def add_common(parser: Parser) -> None:
    """Add the options that all commands have."""
    about = "a Python module that registers your own parts; may be given several times"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=about)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_metrics(parser: Parser) -> None:
    """Add --metrics."""
    about = "what else to measure, separated by commas: top5, balanced_accuracy, macro_f1, auc, ece, perplexity …"
    parser.add_argument("--metrics", metavar="LIST", default="", help=about)
