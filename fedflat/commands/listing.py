"""List what there is, with the fields each name takes and their defaults.

Write one as name, or name(field=value); methods can be added: fedavg+swa.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fedflat.commands.parser import Parser
from fedflat.errors import UnknownNameError

Row = tuple[str, str, str]


def configure(parser: Parser) -> None:
    """Add the one argument."""
    parser.add_argument("what", metavar="|".join(KINDS), help="what to list")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.what not in KINDS:
        raise UnknownNameError("list", arguments.what, KINDS)
    rows = sorted(KINDS[arguments.what]())
    from fedflat.report.terminal import console, plain_table

    out = console()
    out.print(plain_table((arguments.what.removesuffix("s"), "fields", "about"), rows))
    return 0


def _methods() -> Iterable[Row]:
    from fedflat.parts import ALIASES, known_parts

    yield from (described(name, part) for name, part in known_parts().items())
    yield from ((name, described(name, part)[1], f"fedavg+{part.name}") for name, part in ALIASES.items())


def _models() -> Iterable[Row]:
    from fedflat.models import MODELS

    return (described(name, maker, skip=2) for name, maker in MODELS.items())


def _data() -> Iterable[Row]:
    from fedflat.data import DATASETS

    return (described(name, maker, skip=1) for name, maker in DATASETS.items())


def _partitions() -> Iterable[Row]:
    from fedflat.data import PARTITIONS

    return (described(name, maker, skip=3) for name, maker in PARTITIONS.items())


KINDS: dict[str, Callable[[], Iterable[Row]]] = {
    "methods": _methods,
    "models": _models,
    "data": _data,
    "partitions": _partitions,
}


def described(name: str, maker: Callable[..., Any], skip: int = 0) -> Row:
    """Name, fields with defaults, first line of the docstring. skip: leading parameters that a user does not give."""
    parameters = list(inspect.signature(maker).parameters.values())[skip:]
    return name, ", ".join(map(_field, parameters)), first_line(maker)


def _field(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def first_line(thing: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
