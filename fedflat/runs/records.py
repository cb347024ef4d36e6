"""Records of runs, finished or not, for tables and curves; reading them from a run folder does not need torch."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedflat.core.curves import falls, is_share, tail_mean
from fedflat.errors import CheckpointError, InputError, UnknownNameError
from fedflat.experiment import IRRELEVANT, Experiment, check_names
from fedflat.runs.json_files import read_json, read_rows
from fedflat.words import parameters_told

if TYPE_CHECKING:
    import numpy as np

TAIL = 0.1  # fraction of the rounds in a tail average
COUNTED = ("clients", "left_out", "floats_up", "floats_down", "steps")  # numbers that every row of metrics has
JUDGED = ("client", "new", "seen")  # and every row of evaluations
PLAN = ".plan.json"  # in the folder of a series: all its runs, also those to come; hidden from `fedflat show runs/*`


class RunLike(Protocol):
    """What a record needs from a `Run`."""

    experiment: Experiment

    @property
    def metrics(self) -> list[dict[str, Any]]: ...

    @property
    def evaluations(self) -> list[dict[str, Any]]: ...

    @property
    def out(self) -> Path | None: ...

    @property
    def stopped(self) -> str: ...

    @property
    def details(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        experiment: What was run.
        metrics: One dict per round.
        path: The run folder, if there is one.
        label: A name that tells this run from others.
        evaluations: See `Run.evaluations`.
        stopped: See `Run.stopped`.
        details: See `Run.details`.
    """

    experiment: Experiment
    metrics: list[dict[str, Any]]
    path: Path | None = None
    label: str = ""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> dict[str, Any]:
        """How to read the metrics; see `Run.task`."""
        return dict(self.details.get("task", {}))

    @property
    def lead(self) -> str:
        """The metric that runs are judged by."""
        return str(self.task.get("lead", "accuracy"))

    def falls(self, metric: str) -> bool:
        """Whether less of a metric is better; for the clients' means and tails, of the leading one."""
        return bool(self._shown(metric, "falls", falls))

    def is_share(self, metric: str) -> bool:
        """Whether a metric is a share of 1, which tables show in percent."""
        return bool(self._shown(metric, "share", is_share))

    def _shown(self, metric: str, what: str, otherwise: Callable[[str], bool]) -> bool:
        known = self.task.get("metrics", {})
        if metric.startswith(("clients_", "personal_")):
            spread = what == "falls" and metric.endswith("_std")
            return spread or self._shown(self.lead, what, otherwise)
        for test in ("", *self.task.get("tests", ())):
            if (name := metric.removeprefix(f"{test}_")) in known:
                return bool(known[name][what])
        return otherwise(metric)

    @property
    def rounds(self) -> int:
        """The number of rounds done."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def points(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric in the rounds where it is finite."""
        pairs = [(row["round"], row.get(name)) for row in self.metrics]
        return [(round, value) for round, value in pairs if isinstance(value, (int, float)) and math.isfinite(value)]

    def last(self, name: str = "") -> float | None:
        """The latest value of a metric; without a name, of the leading one."""
        points = self.points(name or self.lead)
        return points[-1][1] if points else None

    def best(self, name: str = "") -> tuple[int, float] | None:
        """(round, value) where a metric is best, for the first time."""
        name = name or self.lead
        sign = -1 if self.falls(name) else 1
        return max(self.points(name), key=lambda point: (sign * point[1], -point[0]), default=None)

    def tail(self, name: str = "", share: float = TAIL) -> float | None:
        """Mean of a metric over the last fraction `share` of the rounds done, at least one round."""
        name = name or self.lead
        mean = tail_mean(self.points(name), max(1, math.ceil(share * self.rounds)), self.rounds)
        return self.last(name) if mean is None else mean

    def client_accuracies(self) -> tuple[list[float], list[float]]:
        """Accuracies per client at the last evaluation: of personal models (else the common one), of the common one."""
        rows = [row for row in self.evaluations if not row["new"]]
        last = [row for row in rows if row["round"] == rows[-1]["round"]]
        common = [row["common"] for row in last if row["common"] is not None]
        return [row["personal"] for row in last if row["personal"] is not None] or common, common

    @property
    def unfinished(self) -> bool:
        """Whether rounds are missing."""
        return self.rounds < self.experiment.rounds

    @property
    def ended(self) -> bool:
        """Whether all rounds are done or a callback has stopped the run."""
        return not self.unfinished or bool(self.stopped)

    def file(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the run folder; empty if there is none."""
        path = self.path / name if self.path else None
        if path is None or not path.is_file():
            return {}
        return read_json(path)

    @property
    def preset(self) -> tuple[str, list[str]]:
        """Name and version of the run's preset (empty if it has none), and the fields that were changed."""
        match self.file("environment.json").get("preset"):
            case {"name": str(name), "version": int(version), "changed": list(changed)}:
                return f"{name} v{version}", [str(field) for field in changed]
        return "", []

    @property
    def seconds(self) -> float:
        """Total time of the rounds done."""
        return float(sum(row.get("seconds") or 0.0 for row in self.metrics))

    def cost(self) -> dict[str, float]:
        """Total cost of the rounds done: numbers sent by and to all clients, local steps of all clients, seconds."""
        rows = self.metrics
        return {
            "floats_up": sum(row["floats_up"] * row["clients"] for row in rows),
            "floats_down": sum(row["floats_down"] * (row["clients"] + row["left_out"]) for row in rows),
            "steps": sum(row["steps"] for row in rows),
            "seconds": self.seconds,
        }


def record_of(run: RunLike | Record | str | Path) -> Record:
    """The record of a run or of a run folder."""
    if isinstance(run, Record):
        return run
    if isinstance(run, (str, Path)):
        return _read(Path(run))
    e = run.experiment
    return Record(e, run.metrics, run.out, e.method, run.evaluations, run.stopped, run.details)


def records_of(runs: str | Path | Iterable[RunLike | Record | str | Path]) -> list[Record]:
    """Records of several runs, with labels that differ.

    Args:
        runs: One run folder, or several runs or run folders. A folder of run folders stands for all of them. A folder
            that is given twice counts once. Files are ignored if folders are given as well, because `runs/*` contains
            both.
    """
    named, found = [runs] if isinstance(runs, (str, Path)) else list(runs), dict[Path | int, Record]()
    for run in [run for run in named if not _is_file(run)] or named:
        for each in expand(Path(run)) if isinstance(run, (str, Path)) else [run]:
            found.setdefault(each if isinstance(each, Path) else len(found), record_of(each))
    records = list(found.values())
    return [replace(record, label=label) for record, label in zip(records, labels(records), strict=True)]


def labels(records: Sequence[Record]) -> list[str]:
    """A label per run: its method and the fields in which the runs differ; also the folder where labels are equal."""
    fields = dict.fromkeys(["method", *differing(records)])
    names = [_called(record, fields) for record in records]
    return [
        f"{name} ({record.path})" if names.count(name) > 1 and record.path else name
        for name, record in zip(names, records, strict=True)
    ]


def grouped(records: Sequence[Record], by: Sequence[str] = ()) -> dict[str, list[Record]]:
    """Groups of runs that differ only in the seed, by label; `by` names other fields to group by."""
    check_names(dict.fromkeys(by))
    fields = by or dict.fromkeys(["method", *(name for name in differing(records) if name != "seed")])
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_called(record, fields), []).append(record)
    return groups


def presets(records: Sequence[Record]) -> dict[str, list[int]]:
    """The presets of the runs, with the fields that any of these runs has changed → indices of these runs."""
    places: dict[str, list[int]] = {}
    changed: dict[str, dict[str, None]] = {}
    for place, (name, fields) in enumerate(record.preset for record in records):
        if name:
            places.setdefault(name, []).append(place)
            changed.setdefault(name, {}).update(dict.fromkeys(fields))
    texts = {name: f"{name}, changed: {', '.join(fields)}" if fields else name for name, fields in changed.items()}
    return {texts[name]: found for name, found in places.items()}


def shared_setting(records: Sequence[Record]) -> str:
    """What all these runs have in common: data, clients, model, loss and metrics; without what differs."""
    told = [_setting(record) for record in records]
    return ", ".join(words for words in told[0] if all(words in other for other in told)) if told else ""


def _setting(record: Record) -> list[str]:
    e, size, loss = record.experiment, parameters_told(record.details), record.details.get("loss")
    metrics = [name for name in record.task.get("metrics", ()) if name != "loss"]
    words = [f"data {e.data}", f"{e.clients} clients", f"partition {e.partition}"]
    words += [f"model {e.model}" + (f" ({size})" if size else "")]
    return words + ([f"loss {loss}"] if loss else []) + (["measured: " + " ".join(metrics)] if metrics else [])


def differing(records: Sequence[Record]) -> list[str]:
    """The fields in which runs differ, without those that cannot change a result."""
    tables = [record.experiment.to_dict() for record in records]
    candidates = [name for name in (tables[0] if tables else ()) if name not in IRRELEVANT]
    return [name for name in candidates if len({table[name] for table in tables}) > 1]


def _called(record: Record, fields: Iterable[str]) -> str:
    values = record.experiment.to_dict()
    return ", ".join(values[name] if name == "method" else f"{name}={values[name]}" for name in fields)


def check_metric(name: str, records: Sequence[Record]) -> None:
    """Raise `UnknownNameError` for a metric that no round of these runs has."""
    known = {name for record in records for row in record.metrics for name in row if name != "round"}
    known |= {record.lead for record in records}
    if name not in known:
        raise UnknownNameError("metric", name, known)


def lead_of(records: Sequence[Record]) -> str:
    """The metric that most of these runs are judged by."""
    return Counter(record.lead for record in records).most_common(1)[0][0] if records else "accuracy"


def first_measured(records: Sequence[Record], *names: str) -> str:
    """The first of these metrics that any run has measured; the first name if none was measured."""
    return next((name for name in names if any(record.points(name) for record in records)), names[0])


def _is_file(run: RunLike | Record | str | Path) -> bool:
    return isinstance(run, (str, Path)) and Path(run).is_file()


def expand(path: Path) -> list[Path]:
    """The run folders that a path stands for: the path itself, or the run folders in it."""
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
    rows = read_rows(folder / "metrics.jsonl", COUNTED), read_rows(folder / "evaluations.jsonl", JUDGED)
    record = Record(experiment, rows[0], folder, experiment.method, rows[1], _stopped(folder, len(rows[0])))
    return replace(record, details=_details(record))


def _details(record: Record) -> dict[str, Any]:
    details = record.file("environment.json").get("inputs", {})
    task = details.get("task", {}) if isinstance(details, dict) else None
    shown = task.get("metrics", {}) if isinstance(task, dict) else None
    metrics = shown.values() if isinstance(shown, dict) else [None]
    listed = isinstance(task, dict) and isinstance(task.get("tests", []), list)
    if not listed or not all(isinstance(each, dict) and {"falls", "share"} <= each.keys() for each in metrics):
        raise CheckpointError(f"{record.path}/environment.json is damaged (its inputs are not as they were written)")
    return dict(details)


def _stopped(folder: Path, rounds: int) -> str:
    """Why a callback stopped the run. If the run has continued since, it has more rounds than its checkpoint."""
    with contextlib.suppress(OSError, CheckpointError, KeyError):
        checkpoint = read_json(folder / "checkpoint.json")
        return str(checkpoint["stopped"]) if checkpoint["round"] == rounds else ""
    return ""


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """One array per name, with one value per row; nan where a row has no value."""
    import numpy as np  # here: `fedflat show` starts faster without it

    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([math.nan if row.get(name) is None else row[name] for row in rows]) for name in names}
