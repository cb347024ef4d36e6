"""Tables as JSON lines and other JSON files of a run folder, checked as they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedflat.errors import CheckpointError

HUGE = 1e300  # no number of a table is as large as this


def read_rows(path: Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of a table; empty if the file does not exist.

    An incomplete last line is ignored: the process is still writing it, or was killed while writing.

    Args:
        path: The file.
        needs: Names of numbers that every row must have.

    Raises:
        CheckpointError: A line is damaged.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_row(json.loads(line), needs))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise CheckpointError(f"{path}, line {number}, is damaged ({error}); nothing was deleted") from None
    return rows


def _row(value: Any, needs: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if type(value.get("round")) is not int or value["round"] < 1:
        raise ValueError("it has no round")
    for name in needs:
        if not isinstance(value.get(name), (int, float)):
            raise ValueError(f"it has no number {name!r}")
    for name, entry in value.items():
        if isinstance(entry, (dict, list)) or (isinstance(entry, (int, float)) and not abs(entry) < HUGE):
            raise ValueError(f"{name} is not a number or a word")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` if it is damaged, `FileNotFoundError` if it is missing."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged (it is not an object); nothing was deleted")
    return value
