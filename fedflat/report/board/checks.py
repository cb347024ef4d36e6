"""Checks of a leaderboard's file: a mistake is told when the file is read, not after a night of runs.

Each error begins with the key of the file that it is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedflat.core.method import Method
from fedflat.core.registry import known_parts
from fedflat.errors import InputError, UnknownNameError, one_line
from fedflat.experiment import Experiment, check_names, coerce
from fedflat.parts import SUMS
from fedflat.report.board.entry import BASELINE
from fedflat.specs import Call
from fedflat.words import shortened

KINDS: Mapping[Any, str] = {
    str: 'a text, such as "fedavg"',
    int: "a whole number, such as 3",
    Sequence: "a list in square brackets",
    Mapping: "a table of entries name = value",
}
SEARCH = {"rounds": int, "lr": Sequence}


@contextmanager
def at(key: str) -> Iterator[None]:
    """Put a key of the file before the message of an error."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {one_line(error)}") from None


def check_kind(key: str, value: object, kind: Any) -> None:
    """Refuse a value of another kind, one of `KINDS`; a text is no list, and true is no number."""
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, str) and kind is not str):
        raise InputError(f"{key} takes {KINDS[kind]}, not {shortened(value)}")


def check_tried(key: str, values: Any) -> None:
    """Refuse what is not a list, and an empty one."""
    check_kind(key, values, Sequence)
    if not values:
        raise InputError(f"{key} gives nothing to try: list at least one value")


def check_fields(key: str, values: Any) -> None:
    """Refuse a table with names or types that the fields of an experiment do not have."""
    check_kind(key, values, Mapping)
    with at(key):
        check_names(dict(values))
        for name, value in values.items():
            coerce(name, value)


def check_search(search: Mapping[str, Any]) -> None:
    """Refuse a search without rounds or learning rates that an experiment takes."""
    for name in search:
        if name not in SEARCH:
            raise UnknownNameError("entry of [search]:", name, SEARCH)
    for name, kind in SEARCH.items():
        if name not in search:
            raise InputError(f"[search] needs {name!r}, {KINDS[kind]}")
        check_kind(f"[search] {name}", search[name], kind)
    check_tried("[search] lr", search["lr"])
    with at("[search]"):
        Experiment(rounds=search["rounds"])
        for lr in search["lr"]:
            Experiment(lr=lr)


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse unknown fields, and values that their parts do not take."""
    parts = [key.partition(".")[0] for key in values]
    for key, tried in values.items():
        part, dot, own = key.partition(".")
        if not dot:
            raise InputError(f'[values] takes "part.field" in quotes, such as "sam.rho" = [0.02, 0.1], not {key}')
        if part not in rankable():
            raise UnknownNameError("part in [values]:", part, rankable())
        if own not in usual_values(part):
            raise UnknownNameError(f"field of {part!r} in [values]:", own, usual_values(part))
        if parts.count(part) > 1:
            raise InputError(f"[values] has two fields of {part!r}, but only one is searched: keep one")
        check_tried(f'[values] "{key}"', tried)
        with at(f'[values] "{key}"'):
            for value in tried:
                Method.parse(str(Call(part, kwargs={own: value})))


def check_combinations(methods: Sequence[Any]) -> None:
    """Refuse what is not the text of a method."""
    for method in methods:
        check_kind("each of the combinations", method, str)
        with at("combinations"):
            Method.parse(method)


def check_left_out(reasons: Mapping[str, Any]) -> None:
    """Refuse names that are not ranked anyway, which would leave nothing out, and a missing reason."""
    for name, why in reasons.items():
        if name not in rankable():
            raise UnknownNameError("part in [leave_out]:", name, rankable())
        if name == BASELINE:
            raise InputError(f"[leave_out] {name} cannot be left out, as all are compared with it: remove the line")
        check_kind(f"[leave_out] {name}", why, str)
        if not why.strip():
            raise InputError(f"[leave_out] {name} is empty: write why it is not ranked")


def rankable() -> list[str]:
    """The names of all parts and of the famous sums."""
    return [*known_parts(), *SUMS]


def usual_values(name: str) -> dict[str, Any]:
    """The fields of a part or of a named sum, and their defaults."""
    made = known_parts().get(name) or SUMS.get(name)
    return {} if made is None else {key: value.default for key, value in inspect.signature(made).parameters.items()}
