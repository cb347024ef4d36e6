"""`follow`: a report that is updated while its runs continue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedflat.report.html import write
from fedflat.runs.records import PLAN, Record, records_of

SECONDS = 2.0  # between two checks of the files
RELOAD = 5.0  # seconds after which the page reloads itself
PATTERNS = ("experiment.toml", "*.json", "*.jsonl", "analysis/*.json")


def follow(runs: Sequence[str | Path], path: str | Path, begun: Callable[[Path], None], title: str = "") -> Path:
    """Write a report, and again whenever a file of the runs changes, until all runs have ended. Returns its path.

    If a sweep or a table runs in a folder, this also waits for its runs that have not begun. At the end, also after
    Ctrl-C or an error, the page is written without reloading.

    Args:
        begun: Called with the path once the first page exists, that is, after the first finished round.
    """
    seen: dict[Path, int] = {}
    records: list[Record] = []
    written: Path | None = None
    try:
        while True:
            start, now = time.thread_time(), stamps(runs)
            if now == seen and written and not to_come(runs, records):
                return written  # all runs have ended, and the page shows their last files
            if now != seen:
                seen, records = now, records_of(run for run in runs if holds_runs(Path(run)))
                written = _written(records, path, title, written, begun)
            time.sleep(max(SECONDS, 4 * (time.thread_time() - start)))  # leave the processor to the runs
    finally:
        if written:
            write(records, path, title)


def _written(
    records: list[Record], path: str | Path, title: str, before: Path | None, begun: Callable[[Path], None]
) -> Path | None:
    """Write the page; `before` if no round has finished yet."""
    if not any(record.metrics for record in records):
        return before
    out = write(records, path, title, RELOAD)
    if before is None:
        begun(out)
    return out


def holds_runs(path: Path) -> bool:
    """Whether a path has runs; True if it does not exist, so that `records_of` raises the error."""
    return not path.exists() or any(_files(path, "experiment.toml"))


def _files(path: Path, pattern: str) -> list[Path]:
    """Files that match in a run folder, or in the run folders of a folder."""
    return [*path.glob(pattern), *path.glob(f"*/{pattern}")]


def stamps(runs: Sequence[str | Path]) -> dict[Path, int]:
    """The modification time of each file that a report shows."""
    found = {file for run in runs for pattern in PATTERNS for file in _files(Path(run), pattern)}
    times = {}
    for file in found:
        try:
            times[file] = file.stat().st_mtime_ns
        except FileNotFoundError:  # replaced or deleted since the listing
            continue
    return times


def to_come(runs: Sequence[str | Path], records: Sequence[Record]) -> set[Path | None]:
    """The unfinished runs, and the runs of a series that have not begun, without those that failed."""
    planned = {Path(run) / name: failure for run in runs for name, failure in _plan(Path(run)).items()}
    over = [*(record.path for record in records if record.ended), *(path for path, failed in planned.items() if failed)]
    return {*planned, *(record.path for record in records)}.difference(over)


def _plan(folder: Path) -> dict[str, str]:
    """The runs planned by a series in a folder, with the reason if one failed; empty without a series."""
    try:
        return dict(json.loads((folder / PLAN).read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
