"""Watching a run: the interface, and the display in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.run import Run


class Callback:
    """Override what you need. Methods are called in the process that calls `fedflat.run`."""

    def start(self, run: Run) -> None:
        """Before the first round (of this process: `run.metrics` is not empty when it resumes)."""

    def round(self, run: Run, metrics: Mapping[str, Any]) -> bool | None:
        """After a round; return True to stop the run here."""

    def end(self, run: Run) -> None:
        """After the last round, or when the run stops for any reason."""


class Progress(Callback):
    """A live line: rounds done, accuracy, loss, time left.

    label: what to call the run; its method by default.
    """

    def __init__(self, label: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._label = label
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._began = 0.0
        self._first = 0
        self._scores = ""

    def start(self, run: Run) -> None:
        """Show the bar."""
        self._first, self._began = len(run.metrics), time.monotonic()
        total = run.experiment.rounds
        self._task = self._bar.add_task(self._label or run.experiment.method, total=total, status="", left="")
        self._bar.update(self._task, completed=self._first)
        self._bar.start()

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Advance it."""
        scores = {name: metrics[name] for name in ("accuracy", "loss") if metrics[name] is not None}
        if scores:  # between evaluations the last ones stay
            self._scores = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        train = metrics["train_loss"]
        status = self._scores or (f"train loss {train:.4f}" if train is not None else "")
        done = metrics["round"] - self._first
        left = (time.monotonic() - self._began) / done * (run.experiment.rounds - metrics["round"])
        self._bar.update(self._task, completed=metrics["round"], status=status, left=f"{_clock(left)} left")

    def end(self, run: Run) -> None:
        """Leave the last state on the screen."""
        self._bar.update(self._task, left="")
        self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
