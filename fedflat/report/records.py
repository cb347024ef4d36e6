"""Runs as their folders tell them: enough for tables and curves, read without torch, finished or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.errors import CheckpointError, InputError, UnknownNameError
from fedflat.experiment import Experiment

if TYPE_CHECKING:
    from fedflat.result import Run

TAIL = 0.1  # share of the rounds in a tail average


@dataclass(frozen=True)
class Record:
    """One run: what was run, one dict a round, its folder if it has one, and what to call it among others.

    evaluations: one dict a client and evaluation on its own data, see `Run.evaluations`.
    """

    experiment: Experiment
    metrics: list[dict[str, Any]]
    path: Path | None = None
    label: str = ""
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def points(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric in the rounds that have a finite one."""
        pairs = [(row["round"], row.get(name)) for row in self.metrics]
        return [(round, value) for round, value in pairs if value is not None and math.isfinite(value)]

    def last(self, name: str = "accuracy") -> float | None:
        """The latest value of a metric."""
        points = self.points(name)
        return points[-1][1] if points else None

    def best(self, name: str = "accuracy") -> tuple[int, float] | None:
        """(round, value) of the highest value of a metric, the first such round."""
        return max(self.points(name), key=lambda point: (point[1], -point[0]), default=None)

    def tail(self, name: str = "accuracy", share: float = TAIL) -> float | None:
        """Mean of a metric over the last `share` of the rounds done, one round at least."""
        first = self.rounds - max(1, math.ceil(share * self.rounds))
        values = [value for round, value in self.points(name) if round > first]
        return sum(values) / len(values) if values else self.last(name)

    @property
    def seconds(self) -> float:
        """Time that the rounds done took together."""
        return float(sum(row.get("seconds") or 0.0 for row in self.metrics))


def record_of(run: Run | Record | str | Path) -> Record:
    """A record of a run, or of a run folder."""
    if isinstance(run, Record):
        return run
    if isinstance(run, (str, Path)):
        return _read(Path(run))
    return Record(run.experiment, run.metrics, run.out, run.experiment.method, run.evaluations)


def records_of(runs: Iterable[Run | Record | str | Path]) -> list[Record]:
    """Records of several runs, labelled so that they can be told apart."""
    records = [record_of(run) for run in runs]
    return [replace(record, label=label) for record, label in zip(records, labels(records), strict=True)]


def read_records(paths: Sequence[str | Path]) -> list[Record]:
    """Records of run folders; a folder of run folders stands for all of them."""
    folders = [folder for path in paths for folder in _expand(Path(path))]
    return records_of(dict.fromkeys(folders))


def labels(records: Sequence[Record]) -> list[str]:
    """The method of each run, and whichever fields differ among them; the folder where nothing does."""
    tables = [record.experiment.to_dict() for record in records]
    differing = [
        name
        for name in (tables[0] if tables else ())
        if name not in ("method", "workers", "backend") and len({table[name] for table in tables}) > 1
    ]
    names = [", ".join([t["method"], *(f"{name}={t[name]}" for name in differing)]) for t in tables]
    return [
        f"{name} ({record.path})" if names.count(name) > 1 and record.path else name
        for name, record in zip(names, records, strict=True)
    ]


def _expand(path: Path) -> list[Path]:
    if (path / "experiment.toml").exists():
        return [path]
    if not path.exists():
        near = _runs_in(path.parent)
        if near:
            raise UnknownNameError("run", str(path), [str(run) for run in near])
        raise InputError(f"no such run: {path}")
    found = _runs_in(path)
    if not found:
        raise CheckpointError(f"{path} holds no run: there is no experiment.toml in it")
    return found


def _runs_in(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/experiment.toml"))


def _read(folder: Path) -> Record:
    experiment = Experiment.from_toml(folder / "experiment.toml")
    rows = _rows(folder / "metrics.jsonl"), _rows(folder / "evaluations.jsonl")
    return Record(experiment, rows[0], folder, experiment.method, rows[1])


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table. A last line cut short is that of a round under way and left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise CheckpointError(f"{path}, line {number}, is damaged; nothing was deleted") from None
    return rows
