"""Results as plain numbers, for JSON."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def plain(result: Any, *also: str) -> dict[str, Any]:
    """A dataclass as a dictionary of numbers, text and lists, without the fields that have `repr=False`.

    Numbers that JSON cannot hold become text ("inf", "nan").

    Args:
        also: Names of properties to include.
    """
    names = [entry.name for entry in fields(result) if entry.repr]
    return {name: _plain(getattr(result, name)) for name in (*names, *also)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.to_dict() if is_dataclass(value) and hasattr(value, "to_dict") else value
