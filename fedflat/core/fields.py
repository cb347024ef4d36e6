"""Ranges of hyper-parameters, declared with their fields: `rho: NonNegative = 0.05`."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from fedflat.errors import InputError
from fedflat.words import wanted


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless declared open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}" if self.low > -math.inf else ""
        high = f"{'below' if self.open_high else 'at most'} {self.high:g}" if self.high < math.inf else ""
        return " and ".join(filter(None, [low, high]))


NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open_low=True)]
Fraction = Annotated[float, Range(0, 1)]
PositiveFraction = Annotated[float, Range(0, 1, open_low=True)]
BelowOne = Annotated[float, Range(0, 1, open_high=True)]
Natural = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def check_fields(instance: Any, name: str) -> None:
    """Check every value against the `Range` or `Literal` that its field declares.

    Args:
        instance: A dataclass.
        name: What the error calls it.

    Raises:
        InputError: Names the first field with a value that is not allowed. Where there is a `Range`, what is no finite
            number is not, nor is None unless the field says so.
    """
    kind: Any = type(instance)
    for spec in fields(instance):
        value, hint = getattr(instance, spec.name), _hints(kind)[spec.name]
        allowed = list(_kinds(hint))
        if type(value) is int and float in allowed:  # one spelling per value: 1 and 1.0 are one
            object.__setattr__(instance, spec.name, value := float(value))
        for choice in _declared(hint):
            if isinstance(choice, Range) and not _is_number(value, allowed):
                raise InputError(f"{name}: {spec.name} takes {' or '.join(map(wanted, allowed))}, not {value!r}")
            if value is not None and value not in choice:
                must = str(choice) if isinstance(choice, Range) else " or ".join(map(repr, choice))
                raise InputError(f"{name}: {spec.name} must be {must}, got {value!r}")


def _is_number(value: Any, allowed: list[Any]) -> bool:
    """Whether a field with a range may have this value; numbers of NumPy may."""
    if value is None or isinstance(value, bool):
        return type(value) in allowed
    return isinstance(value, Integral) or (float in allowed and isinstance(value, Real) and isfinite(value))


def _kinds(hint: Any) -> Iterator[Any]:
    """The plain types that an annotation allows."""
    if typing.get_origin(hint) is Annotated:
        yield from _kinds(hint.__origin__)
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for inner in typing.get_args(hint):
            yield from _kinds(inner)
    else:
        yield hint


def _declared(hint: Any) -> Iterator[Any]:
    """The ranges and choices that a type declares."""
    if typing.get_origin(hint) is Literal:
        yield typing.get_args(hint)
    elif typing.get_origin(hint) is Annotated:
        yield from (extra for extra in hint.__metadata__ if isinstance(extra, Range))
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for inner in typing.get_args(hint):
            yield from _declared(inner)
