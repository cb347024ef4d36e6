"""The tables of a run folder: rows are appended, and a checkpoint marks how far they belong to it."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.errors import CheckpointError
from fedflat.runs.files import sync, writing
from fedflat.runs.json_files import read_rows

TABLES = ("metrics", "clients", "evaluations")
Mark = dict[str, list[int]]
"""Table → length in bytes and CRC-32 of the file."""


class TableFiles:
    """The tables in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark: Mark = {table: [0, 0] for table in TABLES}
        self._read: dict[str, tuple[Any, list[dict[str, Any]]]] = {}  # table → file version and its rows

    def path(self, table: str) -> Path:
        """The file of a table."""
        return self._folder / f"{table}.jsonl"

    def append(self, table: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows to a table. They are on the disk for good once `mark` was called."""
        if not rows:
            return
        content = "".join(map(_line, rows)).encode()
        with writing(self.path(table)), self.path(table).open("ab") as file:
            file.write(content)
        length, crc = self._mark[table]
        self._mark[table] = [length + len(content), zlib.crc32(content, crc)]

    def mark(self) -> Mark:
        """Wait until all rows are on the disk. Returns what `check` and `cut` need to come back to this moment."""
        with writing(self.path("metrics")):
            sync([self.path(table) for table, (length, _) in self._mark.items() if length])
        return {table: list(entry) for table, entry in self._mark.items()}

    def check(self, mark: Mapping[str, list[int]]) -> None:
        """Raise `CheckpointError` unless the tables begin with what they held at this mark."""
        for table in TABLES:
            length, crc = mark[table]
            path = self.path(table)
            content = _start(path, length)
            if len(content) < length:
                raise CheckpointError(f"{path} does not have all rows of the checkpoint; nothing was deleted")
            if zlib.crc32(content) != crc:
                raise CheckpointError(f"{path} is damaged: its rows are not those of the checkpoint; nothing deleted")

    def cut(self, mark: Mapping[str, list[int]] | None) -> None:
        """Remove the rows after a mark (None: all), whose rounds will be run again."""
        self._mark = {table: list(mark[table]) if mark else [0, 0] for table in TABLES}
        for table, (length, _) in self._mark.items():
            if self.path(table).exists() and self.path(table).stat().st_size > length:
                os.truncate(self.path(table), length)
        self._read.clear()

    def rows(self, table: str, until: int) -> list[dict[str, Any]]:
        """The rows of a table up to and including round `until`. Reads the file again only when it has changed."""
        path = self.path(table)
        stat = path.stat() if path.exists() else None
        version = (until, stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns))
        if self._read.get(table, (None,))[0] != version:
            self._read[table] = version, [row for row in read_rows(path) if row["round"] <= until]
        return self._read[table][1]


def _start(path: Path, length: int) -> bytes:
    if not length:
        return b""
    try:
        with path.open("rb") as file:
            return file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run folder is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _line(row: dict[str, Any]) -> str:
    """A row as a line of JSON. NaN and ±∞ become null, because JSON has no such numbers."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain) + "\n"
