"""`follow`: a report that is written anew while its runs go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedflat.report.html import write
from fedflat.report.records import PLAN, Record, records_of

SECONDS = 2.0  # between looks at the files
RELOAD = 5.0  # seconds after which the page loads itself again
PATTERNS = ("experiment.toml", "*.json", "*.jsonl", "analysis/*.json")


def follow(runs: Sequence[str | Path], path: str | Path, begun: Callable[[Path], None], title: str = "") -> Path:
    """Write a report, and again whenever a file of the runs changes, until all have ended. Returns its path.

    Where a grid or a table is being run in a folder, the runs in it that have not begun yet are waited for.
    begun: called once the first page is there, which takes a finished round. Whatever ends this, Ctrl-C or an error,
    leaves a page that does not wait for another.
    """
    seen: dict[Path, int] = {}
    records: list[Record] = []
    written: Path | None = None
    try:
        while True:
            start, stamps = time.thread_time(), _stamps(runs)
            if stamps == seen and written and not to_come(runs, records):
                return written  # nothing has changed since the last run was found to have ended
            if stamps != seen:
                seen, records = stamps, records_of(run for run in runs if _holds_runs(Path(run)))
                written = _written(records, path, title, written, begun)
            time.sleep(max(SECONDS, 4 * (time.thread_time() - start)))  # leave the processor to the runs
    finally:
        if written:
            write(records, path, title)


def _written(
    records: list[Record], path: str | Path, title: str, before: Path | None, begun: Callable[[Path], None]
) -> Path | None:
    """The page as of now; nothing while no round has ended."""
    if not any(record.metrics for record in records):
        return before
    out = write(records, path, title, RELOAD)
    if before is None:
        begun(out)
    return out


def _holds_runs(path: Path) -> bool:
    """Whether there is something to read; a path that does not exist is left to whoever reads it to complain of."""
    return not path.exists() or any(_files(path, "experiment.toml"))


def _files(path: Path, pattern: str) -> list[Path]:
    """Of a run folder, or of the run folders in a folder."""
    return [*path.glob(pattern), *path.glob(f"*/{pattern}")]


def _stamps(runs: Sequence[str | Path]) -> dict[Path, int]:
    """When each file that a report shows was last written."""
    found = {file for run in runs for pattern in PATTERNS for file in _files(Path(run), pattern)}
    stamps = {}
    for file in found:
        try:
            stamps[file] = file.stat().st_mtime_ns
        except FileNotFoundError:  # replaced or tidied away between the two looks
            continue
    return stamps


def to_come(runs: Sequence[str | Path], records: Sequence[Record]) -> set[Path | None]:
    """The runs that have rounds to go, and those of a series that have not begun; not those that failed in it."""
    planned = {Path(run) / name: failure for run in runs for name, failure in _plan(Path(run)).items()}
    over = [*(record.path for record in records if record.ended), *(path for path, failed in planned.items() if failed)]
    return {*planned, *(record.path for record in records)}.difference(over)


def _plan(folder: Path) -> dict[str, str]:
    """The runs that a series is to have in a folder, and why those failed that did; empty without a series."""
    try:
        return dict(json.loads((folder / PLAN).read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
