"""The little language of method, model, partition and participation strings: `name(field=value)+name`.

Values are Python literals; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import inspect
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


def _call(node: ast.expr, text: str) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        try:
            args = tuple(ast.literal_eval(a) for a in node.args)
            kwargs = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
        except ValueError:
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
        inspect.signature(maker).bind(*context, *call.args, **call.kwargs)
    except TypeError as error:
        raise InputError(f"{kind} {call}: {error}") from None
    return maker(*context, *call.args, **call.kwargs)
