"""The little language of method, model, partition and participation strings: `name(field=value)+name`.

Values are Python literals; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedflat.errors import InputError, UnknownNameError

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One `name(args)`; `str()` gives it back in canonical form."""

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
    except (SyntaxError, ValueError):
        raise InputError(f"cannot read {text!r}: expected name(field=value)+name") from None
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
    """The members of a list with commas between them; commas inside parentheses do not count.

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
    if kind is types.NoneType:
        return value is None
    if kind in (int, float):
        number = isinstance(value, int) or (kind is float and isinstance(value, float))
        return number and not isinstance(value, bool) and math.isfinite(value)
    if kind is tuple:
        return isinstance(value, (tuple, list)) and all(fits(v, typing.get_args(hint)[0]) for v in value)
    return not isinstance(kind, type) or isinstance(value, kind)


def _wanted(hint: Any) -> str:
    words = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a string"}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(words.get(k, "None" if k is types.NoneType else f"a {k}") for k in kinds)


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
        except (ValueError, TypeError):
            raise InputError(f"cannot read {text!r}: values must be plain numbers, strings or tuples") from None
        return Call(node.func.id, args, kwargs)
    raise InputError(f"cannot read {text!r}: expected name(field=value)+name")


def build(kind: str, call: Call, known: Mapping[str, Callable[..., T]], *context: Any) -> T:
    """Look `call.name` up in `known` and call it with the call's arguments, after the positional `context`.

    kind: what to call such a thing in an error ("method", "partition", …).
    A field that does not exist, or one given twice, becomes an `InputError` naming the nearest known field.
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
    hints = typing.get_type_hints(maker.__init__ if inspect.isclass(maker) else maker)
    for name in fields:
        if name in bound.arguments and not fits(bound.arguments[name], hints.get(name, Any)):
            raise InputError(f"{kind} {call}: {name} takes {_wanted(hints[name])}, not {bound.arguments[name]!r}")
    return maker(*context, *call.args, **call.kwargs)
