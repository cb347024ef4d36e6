"""Callbacks watch a run and can stop it. Displays are in `fedflat.runs.display`, trackers in `fedflat.tracking`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedflat.core.fairness import SUMMARY
from fedflat.engine.measuring import require_recorded
from fedflat.errors import InputError, UnknownNameError
from fedflat.runs.records import record_of

if TYPE_CHECKING:
    from fedflat.runs.result import Run

log = logging.getLogger(__name__)
Stop = bool | str | None
"""What a callback returns: a true value stops the run; best is a short text that says why."""


class Callback:
    """Watches a run, in the process that calls `fedflat.run`. Override what you need.

        class Best(fedflat.Callback):
            def round(self, run, metrics):
                if run.best["round"] == metrics["round"]:
                    print(metrics["round"], metrics["accuracy"])

        fedflat.run(experiment, callbacks=[Best()])

    Data: `run` is the `Run` that will be returned. `metrics` is its last row, `run.metrics[-1]`; a metric that was not
    measured in this round is None or missing. `run.last_clients` and `run.last_evaluations` are the rows that the
    round added; `run.clients` and `run.evaluations` are all rows, read from the run folder at each access. `round` may
    add numbers to `metrics`, such as `metrics["watts"] = 40.5`: they are written to the run folder with the row, and
    curves, comparisons and stopping rules take them like any metric. A callback must change nothing else in the run.

    Order: `start` and `round` are called in the order in which the callbacks were given, `end` in the opposite order.
    All callbacks are called after a round, even if one of them wants to stop.

    Stopping: `start` or `round` returns True, or better a short text that says why, which becomes `run.stopped`. The
    rounds done are saved. If you run the experiment again with a callback that still wants to stop, you get the same
    run back; without one, the run continues.

    Resuming: a killed run goes back to its last checkpoint and repeats the rounds after it, with the same results. So
    `round` may be called for a round that an earlier process has already reported. Take what you need from earlier
    rounds from `run.metrics`, not from attributes of the callback. A run that is already finished calls no callback.

    Errors: an exception in a callback ends the run and reaches the caller of `fedflat.run`; the rounds done are saved.
    `end` is called for every callback whose `start` was called. Ctrl-C waits until a callback returns.
    """

    def start(self, run: Run) -> Stop:
        """Called before the first round of this process; `run.metrics` contains the rounds of earlier processes."""
        return None

    def client(self, run: Run, done: int, asked: int) -> None:
        """Called within a round, when updates have arrived: of `done` of the clients `asked`; small ones in blocks."""

    def round(self, run: Run, metrics: dict[str, Any]) -> Stop:
        """Called after a round, when it has been evaluated and recorded."""
        return None

    def end(self, run: Run) -> None:
        """Called at the end, when everything is saved; `run.status` says how the run ended."""


@dataclass(frozen=True)
class Stopping(Callback):
    """Base class of `EarlyStopping` and `TargetStopping`. It depends only on `run.metrics`, so it survives resuming.

    Args:
        metric: A name in `run.metrics`, or "" for the leading metric of the run's task; rounds in which it was not
            measured do not count.
        mode: "max" or "min"; "auto" is "min" for losses, deviations and times, and "max" for all other metrics.
        strict: Refuse, before the first round, a metric that the run itself will not measure. Otherwise the first row
            decides, to which another callback may have added it.
    """

    metric: str = ""
    mode: str = field(default="auto", kw_only=True)
    strict: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "max", "min"):
            raise UnknownNameError("mode", self.mode, ("auto", "max", "min"))

    def verdict(self, values: list[float], sign: int, name: str) -> str:
        """Why to stop after these values of the metric; empty to continue.

        Args:
            values: The values so far.
            sign: 1 if more is better, -1 if less is better.
            name: What the metric is called.
        """
        raise NotImplementedError

    def start(self, run: Run) -> Stop:
        """Stop if the rounds of earlier processes are enough."""
        if self.strict:
            require_recorded(run._state.setup, self._name(run))
        return self._verdict(run)

    def _verdict(self, run: Run) -> str:
        record, name = record_of(run), self._name(run)
        less = self.mode == "min" or (self.mode == "auto" and record.falls(name))
        return self.verdict([value for _, value in record.points(name)], -1 if less else 1, name)

    def _name(self, run: Run) -> str:
        return self.metric or str(run.task.get("lead", "accuracy"))

    def round(self, run: Run, metrics: Mapping[str, Any]) -> Stop:
        """Stop if the rounds so far are enough. Raises `UnknownNameError` for a metric that no run has."""
        sometimes = {f"{prefix}_{name}" for prefix in ("clients", "personal") for name in SUMMARY}
        name = self._name(run)
        if not any(name in row for row in (metrics, *run.metrics)) and name not in sometimes:
            raise UnknownNameError("metric", name, sometimes | set(metrics))
        return self._verdict(run)

    def end(self, run: Run) -> None:
        """Warn if the metric was never measured."""
        if run.status == "finished" and not record_of(run).points(self._name(run)):
            log.warning("%s was measured in no round, so it could not stop the run", self._name(run))


@dataclass(frozen=True)
class EarlyStopping(Stopping):
    """Stop when a metric has not improved for a while.

    Args:
        metric: See `Stopping`.
        patience: The number of evaluations in a row without a new best value.
        min_delta: A new best value must be better than the old one by more than this.
        mode: See `Stopping`.
    """

    patience: int = 20
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1 or not self.min_delta >= 0:
            raise InputError("EarlyStopping takes a patience of 1 or more and a min_delta of 0 or more")

    def verdict(self, values: list[float], sign: int, name: str) -> str:
        """Why to stop, if `patience` evaluations in a row brought no new best value."""
        best, waited = -math.inf, 0
        for value in values:
            score = sign * value
            best, waited = (score, 0) if score > best + self.min_delta else (best, waited + 1)
            if waited == self.patience:
                return f"{name} has not improved on {sign * best:.4g} in {waited} evaluations"
        return ""


@dataclass(frozen=True)
class TargetStopping(Stopping):
    """Stop when a metric, or its mean over the last few evaluations, has reached a target.

    Args:
        metric: See `Stopping`.
        target: The value to reach.
        average: The number of evaluations that the mean is taken over.
        mode: See `Stopping`.
    """

    target: float = 0.8
    average: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average < 1 or not math.isfinite(self.target):
            raise InputError("TargetStopping takes a finite target and an average over 1 evaluation or more")

    def verdict(self, values: list[float], sign: int, name: str) -> str:
        """Why to stop, if the target was reached."""
        for last in range(self.average, len(values) + 1):
            mean = math.fsum(values[last - self.average : last]) / self.average
            if sign * mean >= sign * self.target:
                over = f" over {self.average} evaluations" if self.average > 1 else ""
                return f"{name} {mean:.4g}{over} has reached {self.target:g}"
        return ""
