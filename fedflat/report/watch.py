"""`follow`: a report that is written anew while its runs go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedflat.report.html import write
from fedflat.report.records import Record, records_of

SECONDS = 2.0  # between looks at the files
RELOAD = 5.0  # seconds after which the page loads itself again
PATTERNS = ("experiment.toml", "*.json", "*.jsonl", "analysis/*.json")


def follow(runs: Sequence[str | Path], path: str | Path, begun: Callable[[Path], None], title: str = "") -> Path:
    """Write a report, and again whenever a file of the runs changes, until all have ended. Returns its path.

    begun: called once the first page is there, which takes a finished round. Whatever ends this, Ctrl-C or an error,
    leaves a page that does not wait for another.
    """
    seen: dict[Path, int] = {}
    records: list[Record] = []
    written: Path | None = None
    try:
        while True:
            start, stamps = time.monotonic(), _stamps(runs)
            if stamps == seen and written and all(map(ended, records)):
                return written  # nothing has changed since the last run was found to have ended
            if stamps != seen:
                seen, records = stamps, records_of(run for run in runs if _holds_runs(Path(run)))
                written = _written(records, path, title, written, begun)
            time.sleep(max(SECONDS, 4 * (time.monotonic() - start)))  # leave the processor to the runs
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


def ended(record: Record) -> bool:
    """Whether all rounds are done, or a callback has stopped the run before."""
    return not record.unfinished or bool(_checkpoint(record).get("stopped"))


def _checkpoint(record: Record) -> dict[str, object]:
    file = record.path / "checkpoint.json" if record.path else None
    try:
        return dict(json.loads(file.read_text())) if file and file.exists() else {}
    except (ValueError, TypeError):
        return {}
