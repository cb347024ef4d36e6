"""Nested dictionaries of tensors, and flat ones with joined names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

State = dict[str, Tensor]
"""Named tensors that one part keeps for one client, or on the server."""
States = dict[str, State]
"""States of several parts, by the part's name."""


def copied(states: Mapping[str, Mapping[str, Tensor]]) -> States:
    """{part: {name: tensor}} with copies of the tensors."""
    return {part: {name: tensor.clone() for name, tensor in state.items()} for part, state in states.items()}


def flatten(nested: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of nested dictionaries, with names joined by "/"; empty dictionaries disappear.

    >>> import torch
    >>> list(flatten({"scaffold": {"c": torch.zeros(1)}, "fedprox": {}}))
    ['scaffold/c']
    """
    flat: dict[str, Tensor] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": tensor for inner, tensor in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def nest(flat: Mapping[str, Tensor], depth: int = 2) -> dict[str, Any]:
    """The inverse of `flatten` for dictionaries of this depth; the innermost names may contain "/"."""
    nested: dict[str, Any] = {}
    for joined, tensor in flat.items():
        *outer, name = joined.split("/", depth - 1)
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = tensor
    return nested
