"""List the available names with their fields and defaults, or explain one name.

In an experiment, write a name as `name` or `name(field=value)`. Methods can be added: fedavg+swa.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedflat.cli.parser import Parser
from fedflat.errors import InputError, UnknownNameError

Row = tuple[str, str, str]
Maker = Callable[..., Any]


class Kind(NamedTuple):
    """What can be listed: makers by name, and the number of their first parameters that a user does not give."""

    makers: Callable[[], Mapping[str, Maker]]
    skip: int = 0


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.add_argument("what", metavar="|".join(KINDS), help="what to list")
    parser.add_argument("name", metavar="NAME", nargs="?", help="explain this one")


def execute(arguments: argparse.Namespace) -> int:
    """Print the table, or the explanation of one name."""
    if arguments.what in ELSEWHERE:
        raise InputError(f"{arguments.what} are listed by `{ELSEWHERE[arguments.what]}`")
    if arguments.what not in KINDS:
        raise UnknownNameError("list", arguments.what, KINDS)
    kind, what = KINDS[arguments.what], arguments.what.removesuffix("s")
    makers, name = kind.makers(), arguments.name
    if name is not None and name not in makers:
        raise UnknownNameError(what, name, makers)
    from fedflat.console import console, plain_table, tell

    if name is not None:
        tell(explained(name, makers[name], kind.skip))
    else:
        rows = sorted(described(name, maker, kind.skip) for name, maker in makers.items())
        console().print(plain_table((what, "fields", "about"), rows))
    return 0


def _methods() -> Mapping[str, Maker]:
    from fedflat.parts import ALIASES, SUMS, known_parts

    return {**known_parts(), **ALIASES, **SUMS}


def _models() -> Mapping[str, Maker]:
    from fedflat.models import MODELS

    return MODELS


def _data() -> Mapping[str, Maker]:
    from fedflat.data import DATASETS

    return DATASETS


def _partitions() -> Mapping[str, Maker]:
    from fedflat.data import PARTITIONS

    return PARTITIONS


def _optimizers() -> Mapping[str, Maker]:
    from fedflat.core.optimizer_choice import OPTIMIZERS

    return OPTIMIZERS


KINDS = {
    "methods": Kind(_methods),
    "models": Kind(_models, skip=2),
    "data": Kind(_data, skip=1),
    "partitions": Kind(_partitions, skip=3),
    "optimizers": Kind(_optimizers),
}
ELSEWHERE = {"presets": "fedflat presets", "tables": "fedflat reproduce", "analyses": "fedflat analyze --list"}


def described(name: str, maker: Maker, skip: int = 0) -> Row:
    """Name, fields with defaults (without the first `skip` parameters), first line of the docstring."""
    parameters = list(inspect.signature(maker).parameters.values())[skip:]
    return name, ", ".join(map(_field, parameters)), _sum_of(name, maker) or first_line(maker)


def explained(name: str, maker: Maker, skip: int = 0) -> str:
    """Name with fields and defaults, the docstring, and the formula of a part."""
    _, fields, about = described(name, maker, skip)
    call, formula = f"{name}({fields})" if fields else name, getattr(maker, "formula", "")
    lines = [f"{call} is {about}" if _sum_of(name, maker) else call, "", inspect.getdoc(maker) or ""]
    return "\n".join([*lines, *(["", *(f"    {line}" for line in formula.splitlines())] if formula else [])])


def _sum_of(name: str, maker: Maker) -> str:
    """The sum that a name of `ALIASES` or `SUMS` stands for; empty for other names."""
    from fedflat.parts import ALIASES, SUMS

    if SUMS.get(name) is maker:
        return "+".join(map(str, SUMS[name]()))
    return f"fedavg+{ALIASES[name].name}" if ALIASES.get(name) is maker else ""


def _field(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def first_line(thing: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
