"""Numbers, names and types as text for people."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal

MISSING, TIE = "–", "\u00a0"  # TIE is a no-break space
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"))
KINDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a string"}
SEVERAL = {int: "whole numbers", float: "finite numbers", str: "strings"}


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage with `digits` decimals.

    >>> percent(0.954)
    '95.4\\xa0%'
    """
    return MISSING if value is None else f"{100 * value:.{digits}f}{TIE}%"


def number(value: float | None) -> str:
    """A number with three significant digits.

    >>> number(0.012345), number(12345), number(None)
    ('0.0123', '12345', '–')
    """
    if value is None:
        return MISSING
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def amount(value: float) -> str:
    """A large number in a few digits.

    >>> amount(4_810_000), amount(640)
    ('4.8 M', '640')
    """
    return next((f"{value / size:.1f}{unit}" for size, unit in UNITS if value >= size), f"{value:.0f}")


def clock(seconds: float) -> str:
    """A duration in hours, minutes and seconds.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """A duration in seconds, or from one minute on as `clock` writes it."""
    return clock(seconds) if seconds >= 60 else f"{seconds:.1f} s"


def with_spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation, with three and two significant digits at most; of one value, the mean alone.

    >>> with_spread([2.0, 2.1]), with_spread([41.0, 49.0]), with_spread([0.5])
    ('2.05\\xa0±\\xa00.07', '45.0\\xa0±\\xa05.7', '0.5')
    """
    deviation = stdev(values) if len(values) > 1 else 0.0
    if not deviation:
        return number(fmean(values)) if values else MISSING
    mean = fmean(values)
    digits = max(0, min(1 - _order(deviation), 2 - _order(mean or deviation)))
    return f"{mean:.{digits}f}{TIE}±{TIE}{deviation:.{digits}f}"


def _order(value: float) -> int:
    """The power of ten of the first digit."""
    return math.floor(math.log10(abs(value)))


def listed(names: Sequence[str]) -> str:
    """Names as part of a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # reverse the text


def printable(text: str) -> str:
    """Text in which control characters, which a terminal would obey, are written out.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return text.translate(_CONTROLS)


def shortened(value: object, most: int = 60) -> str:
    """A value as in Python's source; the middle of a long one is left out."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write out numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-10:]} ({len(text)} characters)"


def parameters_told(details: Mapping[str, Any]) -> str:
    """How many parameters are trained and how many are not, as records tell it; empty if they do not.

    >>> parameters_told({"parameters": 1503, "frozen": 4500})
    '1503 parameters and 4500 frozen ones'
    """
    trained, frozen = details.get("parameters"), details.get("frozen")
    return f"{trained} parameters" + (f" and {frozen} frozen ones" if frozen else "") if trained else ""


def wanted(hint: Any) -> str:
    """In words, what fits an annotation.

    >>> wanted(float | None), wanted(tuple[int, ...]), wanted(Literal["a", 1])
    ('a finite number or None', 'a tuple of whole numbers', "'a' or 1")
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind in (types.UnionType, typing.Union):
        return " or ".join(map(wanted, inner))
    if kind is types.NoneType:
        return "None"
    if kind is tuple:
        return f"a tuple of {SEVERAL.get(inner[0], 'values')}" if inner else "a tuple"
    return KINDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
