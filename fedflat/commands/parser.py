"""A parser that raises `InputError` instead of leaving the process, and that knows the nearest name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from fedflat.errors import InputError, UnknownNameError


class Parser(argparse.ArgumentParser):
    """`argparse` with one-line errors.

    Options may be spelled with - or _. Those named in `switches` take true or false, and mean true when they stand
    alone. unknown: what to call an option in the error about one that does not exist.
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
        """The arguments, or an `InputError`."""
        arguments, extra = self.parse_known_args(self._spelled(words))
        for word in extra:
            if word.startswith("--"):
                name = word.split("=")[0].lstrip("-").replace("-", "_")
                raise UnknownNameError(self.unknown, name, self._names())
            raise InputError(f"unexpected {word!r}; see {self.prog} --help")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong."""
        raise InputError(f"{message}; see {self.prog} --help")

    def _names(self) -> list[str]:
        options = [option for option in self._option_string_actions if option.startswith("--")]
        return sorted({option.lstrip("-").replace("-", "_") for option in options})

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """The words with options spelled as argparse knows them, and switches with their value attached."""
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


def add_data_root(parser: Parser) -> None:
    """Add --data-root."""
    parser.add_argument("--data-root", metavar="DIR", help="where data sets lie; else $FEDFLAT_DATA or a cache folder")


def add_common(parser: Parser) -> None:
    """Add what every command understands."""
    about = "a Python module that registers parts of your own; may be given several times"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=about)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
