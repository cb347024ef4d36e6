"""Runs as their folders tell them: enough for tables and curves, read without torch, finished or not."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.errors import CheckpointError, InputError, UnknownNameError
from fedflat.experiment import IRRELEVANT, Experiment, check_names
from fedflat.rows import read_rows

if TYPE_CHECKING:
    from fedflat.result import Run

TAIL = 0.1  # share of the rounds in a tail average
PLAN = ".plan.json"  # beside the runs of a series: which there are to be; hidden from `fedflat show runs/*`


def round_reaching(points: Iterable[tuple[int, float]], target: float) -> int | None:
    """The first round of a curve, (round, value) by rising round, that reaches a target; None where none does."""
    return next((round for round, value in points if value >= target), None)


@dataclass(frozen=True)
class Record:
    """One run: what was run, one dict a round, its folder if it has one, and what to call it among others.

    evaluations: one dict a client and evaluation on its own data, see `Run.evaluations`. stopped: see `Run.stopped`.
    """

    experiment: Experiment
    metrics: list[dict[str, Any]]
    path: Path | None = None
    label: str = ""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""

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

    def client_accuracies(self) -> tuple[list[float], list[float]]:
        """Of the clients' own models (the common one where the method has no other) and of the common one, at last."""
        rows = [row for row in self.evaluations if not row["new"]]
        last = [row for row in rows if row["round"] == rows[-1]["round"]]
        common = [row["common"] for row in last if row["common"] is not None]
        return [row["personal"] for row in last if row["personal"] is not None] or common, common

    @property
    def unfinished(self) -> bool:
        """Whether there are rounds to go."""
        return self.rounds < self.experiment.rounds

    @property
    def ended(self) -> bool:
        """Whether no round is to come: all are done, or a callback has stopped the run before."""
        return not self.unfinished or bool(self.stopped)

    def file(self, name: str) -> dict[str, Any]:
        """A JSON file of the run folder; empty where there is none."""
        path = self.path / name if self.path else None
        if path is None or not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from None

    @property
    def preset(self) -> tuple[str, list[str]]:
        """Name and version of the preset that the run was made from, and the fields that were changed; or nothing."""
        match self.file("environment.json").get("preset"):
            case {"name": str(name), "version": int(version), "changed": list(changed)}:
                return f"{name} v{version}", [str(field) for field in changed]
        return "", []

    @property
    def seconds(self) -> float:
        """Time that the rounds done took together."""
        return float(sum(row.get("seconds") or 0.0 for row in self.metrics))

    def cost(self) -> dict[str, float]:
        """What the rounds done cost: numbers sent by and to all clients, steps of all clients, seconds."""
        rows = self.metrics
        return {
            "floats_up": sum(row["floats_up"] * row["clients"] for row in rows),
            "floats_down": sum(row["floats_down"] * (row["clients"] + row["left_out"]) for row in rows),
            "steps": sum(row["steps"] for row in rows),
            "seconds": self.seconds,
        }


def record_of(run: Run | Record | str | Path) -> Record:
    """A record of a run, or of a run folder."""
    if isinstance(run, Record):
        return run
    if isinstance(run, (str, Path)):
        return _read(Path(run))
    return Record(run.experiment, run.metrics, run.out, run.experiment.method, run.evaluations, run.stopped)


def records_of(runs: str | Path | Iterable[Run | Record | str | Path]) -> list[Record]:
    """Records of several runs, labelled so that they can be told apart.

    A folder of run folders stands for all of them; a folder that is named twice counts once. Files are passed over if
    there is anything else: `runs/*` names what else lies there as well. A single name needs no list.
    """
    named, found = [runs] if isinstance(runs, (str, Path)) else list(runs), dict[Path | int, Record]()
    for run in [run for run in named if not _is_file(run)] or named:
        for each in expand(Path(run)) if isinstance(run, (str, Path)) else [run]:
            found.setdefault(each if isinstance(each, Path) else len(found), record_of(each))
    records = list(found.values())
    return [replace(record, label=label) for record, label in zip(records, labels(records), strict=True)]


def labels(records: Sequence[Record]) -> list[str]:
    """The method of each run, and whichever fields differ among them; the folder where nothing does."""
    fields = dict.fromkeys(["method", *differing(records)])
    names = [_called(record, fields) for record in records]
    return [
        f"{name} ({record.path})" if names.count(name) > 1 and record.path else name
        for name, record in zip(names, records, strict=True)
    ]


def grouped(records: Sequence[Record], by: Sequence[str] = ()) -> dict[str, list[Record]]:
    """Runs that differ in nothing but the seed, under what to call them. by: fields to group by instead."""
    check_names(dict.fromkeys(by))
    fields = by or dict.fromkeys(["method", *(name for name in differing(records) if name != "seed")])
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_called(record, fields), []).append(record)
    return groups


def presets(records: Sequence[Record]) -> dict[str, list[int]]:
    """What presets runs were made from, with all fields that any of them has changed, and the places of these runs."""
    places: dict[str, list[int]] = {}
    changed: dict[str, dict[str, None]] = {}
    for place, (name, fields) in enumerate(record.preset for record in records):
        if name:
            places.setdefault(name, []).append(place)
            changed.setdefault(name, {}).update(dict.fromkeys(fields))
    texts = {name: f"{name}, changed: {', '.join(fields)}" if fields else name for name, fields in changed.items()}
    return {texts[name]: found for name, found in places.items()}


def differing(records: Sequence[Record]) -> list[str]:
    """The fields in which runs differ; those that cannot change a result do not count."""
    tables = [record.experiment.to_dict() for record in records]
    candidates = [name for name in (tables[0] if tables else ()) if name not in IRRELEVANT]
    return [name for name in candidates if len({table[name] for table in tables}) > 1]


def _called(record: Record, fields: Iterable[str]) -> str:
    values = record.experiment.to_dict()
    return ", ".join(values[name] if name == "method" else f"{name}={values[name]}" for name in fields)


def check_metric(name: str, records: Sequence[Record]) -> None:
    """Refuse a metric that no round of these runs has, with the nearest known name."""
    known = {name for record in records for row in record.metrics for name in row if name != "round"} | {"accuracy"}
    if name not in known:
        raise UnknownNameError("metric", name, known)


def first_measured(records: Sequence[Record], *names: str) -> str:
    """The first of some metrics that any run has a value of; the first of all where there is none."""
    return next((name for name in names if any(record.points(name) for record in records)), names[0])


def _is_file(run: Run | Record | str | Path) -> bool:
    return isinstance(run, (str, Path)) and Path(run).is_file()


def expand(path: Path) -> list[Path]:
    """The run folders that a name stands for: itself, or those in it."""
    if (path / "experiment.toml").exists():
        return [path]
    if not path.exists():
        near = _runs_in(path.parent)
        if near:
            raise UnknownNameError(f"run in {path.parent}:", path.name, [run.name for run in near])
        raise InputError(f"no such run: {path}")
    found = _runs_in(path)
    if not found:
        raise CheckpointError(f"{path} holds no run: there is no experiment.toml in it")
    return found


def _runs_in(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/experiment.toml"))


def _read(folder: Path) -> Record:
    experiment = Experiment.from_toml(folder / "experiment.toml")
    rows = read_rows(folder / "metrics.jsonl"), read_rows(folder / "evaluations.jsonl")
    return Record(experiment, rows[0], folder, experiment.method, rows[1], _stopped(folder, len(rows[0])))


def _stopped(folder: Path, rounds: int) -> str:
    """Why a callback ended the run; a run that goes on has more rounds than the checkpoint that says so."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        checkpoint = json.loads((folder / "checkpoint.json").read_text())
        return str(checkpoint["stopped"]) if checkpoint["round"] == rounds else ""
    return ""
