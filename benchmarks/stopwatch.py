"""Seconds spent in functions, whoever calls them."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def watch(places: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """Have functions such as "package.module:Class.method" add up, under a name, the seconds spent in them."""
    spent = dict.fromkeys(places, 0.0)
    for name, functions in places.items():
        for function in functions:
            module, _, path = function.partition(":")
            *owners, last = path.split(".")
            home = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(home, last, timed(getattr(home, last), name, spent))
    return spent


def timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """`function`, which adds the seconds of every call to `spent[name]`."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    return measured
