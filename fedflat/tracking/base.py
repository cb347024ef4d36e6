"""What all trackers do: every round once, in order, whenever the run was killed and whoever tracked it before."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.callbacks import Callback
from fedflat.errors import InputError

if TYPE_CHECKING:
    from fedflat.result import Run

FILES = ("experiment.toml", "environment.json", "metrics.jsonl", "*.html")  # of the run folder, to go along
SPREADS = {"clients_accuracy": "common", "personal_accuracy": "personal"}  # name: column of the evaluations


class Tracker(Callback):
    """Copies a run to where one can look at it: its fields, every round's figures, the clients' accuracies.

    A run that is resumed goes on in the same place. Rounds that are there are not written again, and those that are
    missing, because a process was killed or did not track, are written first. started: whether a run has called it.

    A tracker of your own fills `open`, `write` and `close`.
    """

    started = False

    def start(self, run: Run) -> None:
        """Open the place and write what it lacks of the earlier rounds."""
        self.started = True
        self.open(run)
        evaluations: dict[int, list[Mapping[str, Any]]] = {}
        for row in run.evaluations:
            evaluations.setdefault(row["round"], []).append(row)
        for metrics, moment in zip(run.metrics, _moments(run.metrics), strict=True):
            self.write(metrics["round"], figures(metrics), spreads(evaluations.get(metrics["round"], [])), moment)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Write a round."""
        self.write(metrics["round"], figures(metrics), spreads(run.last_evaluations), time.time())

    def end(self, run: Run) -> None:
        """Close the place."""
        self.close(run)

    def copy(self, run: Run) -> None:
        """Track a run that has ended, such as one from `load_run`."""
        self.start(run)
        self.end(run)

    def open(self, run: Run) -> None:
        """Make the place ready and write the experiment's fields there."""
        raise NotImplementedError

    def write(self, round: int, values: Mapping[str, float], spread: Mapping[str, np.ndarray], moment: float) -> None:
        """Write the figures of a round and the accuracies of its clients, unless they are there.

        moment: when it ended, in seconds since 1970.
        """
        raise NotImplementedError

    def close(self, run: Run) -> None:
        """Leave everything where it belongs; `run.status` tells how the run ended."""
        raise NotImplementedError


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics of a round, but for the number of the round."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "round"}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def spreads(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Accuracies of the clients that may train, by model, where there are any."""
    found = {
        name: np.array([row[model] for row in rows if not row["new"] and row[model] is not None])
        for name, model in SPREADS.items()
    }
    return {name: accuracies for name, accuracies in found.items() if accuracies.size}


def _moments(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each round would have ended, had they been run without a break until now."""
    moment, moments = time.time(), list[float]()
    for row in reversed(rows):
        moments.append(moment)
        moment -= row["seconds"]
    return moments[::-1]


def inside(run: Run, name: str) -> Path:
    """A place in the run folder."""
    if run.out is None:
        raise InputError("where is it to be tracked? Give the run a folder (out=), or the tracker a place of its own")
    return run.out.absolute() / name


def identity(run: Run) -> str:
    """A name unlike any other run's, which the run keeps when it is resumed."""
    if run.out is None:
        return secrets.token_hex(4)
    path = run.out / ".id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def title(run: Run) -> str:
    """What to call the run among others."""
    return run.out.name if run.out else run.experiment.method


def files(run: Run) -> list[Path]:
    """Files of the run folder that are small and say what was run and what came out."""
    return [file for pattern in FILES for file in sorted(run.out.glob(pattern))] if run.out else []
