"""Read method, model, partition and participation strings, `name(field=value)+name`, and grids.

Values are Python literals; no code is executed. A grid is an option with several values:
`--lr 0.01,0.1 --seed 0..2` are six experiments.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from typing import Any, Literal, TypeVar

from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment, coerce, field_type
from fedflat.words import shortened, wanted

T = TypeVar("T")
LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Call:
    """One `name(args)`; `str()` returns it in canonical form."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inner = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(inner)})" if inner else self.name


def parse_sum(text: str) -> list[Call]:
    """Read `"a(x=1)+b"` as a list of calls.

    >>> [str(call) for call in parse_sum("feddc(alpha=0.01) + man")]
    ['feddc(alpha=0.01)', 'man']
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"cannot read {shortened(text)}: expected name(field=value)+name") from None
    calls: list[Call] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        calls.append(_call(tree.right, text))
        tree = tree.left
    return [_call(tree, text), *reversed(calls)]


def parse(text: str) -> Call:
    """Read one `"name(args)"`."""
    calls = parse_sum(text)
    if len(calls) != 1:
        raise InputError(f"{text!r} names {len(calls)} things; one was expected")
    return calls[0]


def split(text: str) -> list[str]:
    """Split a list at its commas, except inside parentheses.

    >>> split("fedavg, gradaug(n=1, width=0.5)+sam")
    ['fedavg', 'gradaug(n=1, width=0.5)+sam']
    """
    words, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            words.append("")
        else:
            words[-1] += sign
    return [word.strip() for word in words if word.strip()]


def fits(value: Any, hint: Any) -> bool:
    """Whether a literal can be the value of a field with this annotation; numbers must be finite.

    >>> fits(1, float), fits("1", float), fits(None, float | None), fits((1, 2), tuple[int, ...])
    (True, False, True, True)
    """
    if isinstance(hint, types.UnionType):
        return any(fits(value, arg) for arg in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is typing.Union:
        return any(fits(value, arg) for arg in typing.get_args(hint))
    if kind is Literal:
        return value in typing.get_args(hint)
    if kind is types.NoneType:
        return value is None
    if kind in (int, float):
        number = isinstance(value, int) or (kind is float and isinstance(value, float))
        return number and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
    if kind is tuple:
        return isinstance(value, (tuple, list)) and all(fits(v, typing.get_args(hint)[0]) for v in value)
    return not isinstance(kind, type) or isinstance(value, kind)


def _call(node: ast.expr, text: str) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        names = [k.arg for k in node.keywords]
        if None in names or len(set(names)) < len(names):
            raise InputError(f"cannot read {text!r}: give every field once, as field=value")
        try:
            args = tuple(ast.literal_eval(a) for a in node.args)
            kwargs = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        except (ValueError, TypeError, RecursionError, MemoryError):
            message = (
                f"cannot read {shortened(text)}: values must be finite numbers, 'strings', tuples, True, False or None"
            )
            raise InputError(message) from None
        return Call(node.func.id, args, kwargs)
    raise InputError(f"cannot read {shortened(text)}: expected name(field=value)+name")


def build(kind: str, call: Call, known: Mapping[str, Callable[..., T]], *context: Any) -> T:
    """Look up `call.name` in `known` and call what is found.

    Args:
        kind: What errors call it ("method", "partition", …).
        call: Name and arguments.
        known: Functions or classes by name.
        context: Positional arguments that come before those of `call`.

    Raises:
        InputError: An unknown name or field (the message suggests the nearest known one), or an unsuitable value.
    """
    if call.name not in known:
        raise UnknownNameError(kind, call.name, known)
    maker = known[call.name]
    fields = list(inspect.signature(maker).parameters)[len(context) :]
    for name in call.kwargs:
        if name not in fields:
            raise UnknownNameError(f"field of {kind} {call.name!r}:", name, fields)
    if len(call.args) > len(fields):
        raise InputError(f"{kind} {call.name!r} takes at most {len(fields)} values, got {len(call.args)}")
    try:
        bound = inspect.signature(maker).bind(*context, *call.args, **call.kwargs)
    except TypeError as error:
        raise InputError(f"{kind} {call}: {error}") from None
    hints = _hints(kind, call.name, maker)
    for name in fields:
        if name in bound.arguments and not fits(bound.arguments[name], hints.get(name, Any)):
            value = shortened(bound.arguments[name])
            raise InputError(f"{kind} {call.name!r}: {name} takes {wanted(hints[name])}, not {value}")
    return maker(*context, *call.args, **call.kwargs)


def _hints(kind: str, name: str, maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(maker.__init__ if inspect.isclass(maker) and not is_dataclass(maker) else maker)
    except NameError as error:  # a user's own, with types that are imported for type checkers only
        raise InputError(
            f"the types of {kind} {name!r} cannot be read: {error}; import that name in {maker.__module__} itself"
        ) from None


# ---- grids ----

MOST = 10_000  # values of one range; more are surely a mistake


def combinations(options: Mapping[str, str]) -> list[dict[str, Any]]:
    """All combinations of the options' values; later fields of `Experiment` vary faster."""
    names = [name for name in Experiment.__dataclass_fields__ if name in options]
    return [dict(zip(names, values, strict=True)) for values in product(*(values_in(n, options[n]) for n in names))]


def values_in(name: str, text: str) -> list[Any]:
    """Read a field's values, separated by commas; `a..b` stands for the whole numbers from a to b.

    The commas of `device` separate the devices of one run.

    >>> values_in("seed", "0..2,7"), values_in("partition", "lda_hsu(alpha=0.5),iid")
    ([0, 1, 2, 7], ['lda_hsu(alpha=0.5)', 'iid'])
    """
    if name == "device":
        return [coerce(name, text)]
    counts = field_type(name)[0] is int
    found = [value for word in split(text) or [text] for value in (_counted(name, word) if counts else [word])]
    return list(dict.fromkeys(coerce(name, value) for value in found))


def _counted(name: str, word: str) -> list[Any]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", word)
    if ends is None:
        return [word]
    first, last = map(int, ends.groups())
    if not 0 <= last - first < MOST:
        raise InputError(f"{name}: a range a..b needs a ≤ b and has at most {MOST} values, not {word}")
    return list(range(first, last + 1))
