"""The base class of all trackers. It writes every round once, in order, even if the run was killed in between."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.errors import InputError
from fedflat.runs.callbacks import Callback

if TYPE_CHECKING:
    from fedflat.runs.result import Run

FILES = ("experiment.toml", "environment.json", "metrics.jsonl", "*.html")  # files of the run folder to copy
SPREADS = {"clients_accuracy": "common", "personal_accuracy": "personal"}  # name: column of the evaluations


class Tracker(Callback):
    """Copies a run to a tracking tool: its fields, the metrics of every round, the clients' accuracies.

    A resumed run continues in the same place. Rounds already stored are not written again; rounds that are missing,
    because a process was killed or did not track, are written first. Your own tracker implements `open`, `write` and
    `close`.

    Attributes:
        started: Whether a run has called this tracker.
    """

    started = False

    def start(self, run: Run) -> None:
        """Open the tool and write the earlier rounds that it does not have."""
        self.started = True
        self.open(run)
        evaluations: dict[int, list[Mapping[str, Any]]] = {}
        for row in run.evaluations:
            evaluations.setdefault(row["round"], []).append(row)
        for metrics, moment in zip(run.metrics, _moments(run.metrics), strict=True):
            self.write(
                metrics["round"], finite_metrics(metrics), spreads(evaluations.get(metrics["round"], [])), moment
            )

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Write one round."""
        self.write(metrics["round"], finite_metrics(metrics), spreads(run.last_evaluations), time.time())

    def end(self, run: Run) -> None:
        """Close the tool."""
        self.close(run)

    def copy(self, run: Run) -> None:
        """Track a run that has ended, such as one from `load_run`."""
        self.start(run)
        self.end(run)

    def open(self, run: Run) -> None:
        """Begin or continue the run in the tool, and write the experiment's fields."""
        raise NotImplementedError

    def write(self, round: int, values: Mapping[str, float], spread: Mapping[str, np.ndarray], moment: float) -> None:
        """Write one round, unless it is already stored.

        Args:
            values: The finite metrics of the round.
            spread: The clients' accuracies, for a histogram.
            moment: When the round ended, in seconds since 1970.
        """
        raise NotImplementedError

    def close(self, run: Run) -> None:
        """Finish; `run.status` says how the run ended."""
        raise NotImplementedError


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics of a round, without the number of the round."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "round"}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def spreads(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Accuracies of the clients that may train, by model; models without accuracies are left out."""
    found = {
        name: np.array([row[model] for row in rows if not row["new"] and row[model] is not None])
        for name, model in SPREADS.items()
    }
    return {name: accuracies for name, accuracies in found.items() if accuracies.size}


def _moments(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each round would have ended if all had run without a break until now."""
    moment, moments = time.time(), list[float]()
    for row in reversed(rows):
        moments.append(moment)
        moment -= row["seconds"]
    return moments[::-1]


def inside(run: Run, name: str) -> Path:
    """A path in the run folder."""
    if run.out is None:
        raise InputError("where is it to be tracked? Give the run a folder (out=), or the tracker a place of its own")
    return run.out.absolute() / name


def identity(run: Run) -> str:
    """A unique name that the run keeps when it is resumed."""
    if run.out is None:
        return secrets.token_hex(4)
    path = run.out / ".id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def title(run: Run) -> str:
    """The name shown for the run."""
    return run.out.name if run.out else run.experiment.method


def files(run: Run) -> list[Path]:
    """The small files of the run folder that describe the run and its results."""
    return [file for pattern in FILES for file in sorted(run.out.glob(pattern))] if run.out else []
