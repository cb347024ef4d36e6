"""Inputs of a model: a tensor, or dictionaries, lists and (named) tuples of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def map_inputs(function: Callable[[Any], Any], x: Any) -> Any:
    """The same structure with `function` applied to every leaf.

    >>> map_inputs(abs, {"a": -1, "b": (-2, [-3])})
    {'a': 1, 'b': (2, [3])}
    """
    if isinstance(x, dict):
        return {key: map_inputs(function, value) for key, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):  # a named tuple takes its fields as separate arguments
        return type(x)(*(map_inputs(function, value) for value in x))
    if isinstance(x, (list, tuple)):
        return type(x)(map_inputs(function, value) for value in x)
    return function(x)


def concatenated(xs: Sequence[Any]) -> Any:
    """Concatenate inputs of the same structure along the samples."""
    first = xs[0]
    if isinstance(first, dict):
        return {key: concatenated([x[key] for x in xs]) for key in first}
    if isinstance(first, (list, tuple)):
        leaves = [concatenated(column) for column in zip(*xs, strict=True)]
        return type(first)(*leaves) if hasattr(first, "_fields") else type(first)(leaves)
    return torch.cat(list(xs))


def first_leaf(x: Any) -> Any:
    """The first tensor of a structure."""
    while isinstance(x, (dict, list, tuple)):
        x = next(iter(x.values() if isinstance(x, dict) else x))
    return x
