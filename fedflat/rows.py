"""Tables of JSON lines, one row a line, that a process may be killed while writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedflat.errors import CheckpointError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; none without the file. A last line cut short is that of a round under way and left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise CheckpointError(f"{path}, line {number}, is damaged; nothing was deleted") from None
    return rows
