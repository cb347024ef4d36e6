"""Watching a run, and stopping it. Displays are in `fedflat.report.progress`, trackers in `fedflat.tracking`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedflat.errors import InputError, UnknownNameError
from fedflat.fairness import SUMMARY

if TYPE_CHECKING:
    from fedflat.result import Run

log = logging.getLogger(__name__)
Stop = bool | str | None
"""What a callback answers: something true stops the run, best a few words that say why."""

FALLS = ("loss", "_std", "seconds")  # how the names of metrics end of which less is better


def falls(metric: str) -> bool:
    """Whether less of a metric is better."""
    return metric.endswith(FALLS)


class Callback:
    """Watches a run from the process that calls `fedflat.run`; override what you need.

        class Best(fedflat.Callback):
            def round(self, run, metrics):
                if run.best["round"] == metrics["round"]:
                    print(metrics["round"], metrics["accuracy"])

        fedflat.run(experiment, callbacks=[Best()])

    What it can see: `run` is the `Run` that will be returned, `metrics` its newest row, `run.metrics[-1]`; figures that
    were not measured in this round are None or missing. `run.last_clients` and `run.last_evaluations` are the rows that
    the round added to `run.clients` and `run.evaluations`, which are read from the run folder whenever they are asked
    for. A callback looks and changes nothing.

    Order: `start` and `round` are called in the order in which the callbacks were given, `end` in the opposite order.
    All hear of a round, also when one of them wants to stop.

    Stopping: `start` or `round` returns True, or better a few words that say why. They become `run.stopped`, and the
    rounds done are saved. Who runs the experiment again with a callback that still wants to stop gets the same run
    back; with none, the run goes on.

    Resuming: a run that was killed goes back to its last checkpoint and repeats, with the same results, the rounds
    after it, so that `round` may hear of a round that an earlier process has heard of. What a callback must know of
    earlier rounds should therefore come from `run.metrics` and not from what it remembers. A run that is found
    finished calls nobody.

    Errors: what a callback raises ends the run and reaches the caller of `fedflat.run`; the rounds done are saved.
    Every callback that was started is ended, whatever happened. Ctrl-C waits until a callback returns.
    """

    def start(self, run: Run) -> Stop:
        """Before the first round of this process; `run.metrics` holds the earlier ones where the run is resumed."""
        return None

    def round(self, run: Run, metrics: Mapping[str, Any]) -> Stop:
        """After a round, once it is evaluated and recorded."""
        return None

    def end(self, run: Run) -> None:
        """After the last round, once all is saved; `run.status` tells whether it finished, was stopped or failed."""


@dataclass(frozen=True)
class Stopping(Callback):
    """What the two rules have in common: they depend on nothing but `run.metrics`, so resuming changes nothing.

    metric: a name in `run.metrics`; rounds in which it was not measured do not count.
    mode: whether "max" or "min" is good; "auto" is min for losses, deviations and times, and max for all else.
    """

    metric: str = "accuracy"
    mode: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "max", "min"):
            raise UnknownNameError("mode", self.mode, ("auto", "max", "min"))

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return -1 if self.mode == "min" or (self.mode == "auto" and falls(self.metric)) else 1

    def verdict(self, values: list[float]) -> str:
        """Why these values of the metric, in order, are enough; empty while they are not."""
        raise NotImplementedError

    def start(self, run: Run) -> Stop:
        """Stop before a round if what was done earlier is enough."""
        return self.verdict(self._values(run))

    def round(self, run: Run, metrics: Mapping[str, Any]) -> Stop:
        """Stop if it is enough now; a metric that no run has is refused."""
        sometimes = {f"{prefix}_{name}" for prefix in ("clients", "personal") for name in SUMMARY}
        if not any(self.metric in row for row in (metrics, *run.metrics)) and self.metric not in sometimes:
            raise UnknownNameError("metric", self.metric, sometimes | set(metrics))
        return self.verdict(self._values(run))

    def end(self, run: Run) -> None:
        """Warn if there was nothing to judge by."""
        if run.status == "finished" and not self._values(run):
            log.warning("%s was measured in no round, so that it could not stop the run", self.metric)

    def _values(self, run: Run) -> list[float]:
        values = (row.get(self.metric) for row in run.metrics)
        return [value for value in values if value is not None and math.isfinite(value)]


@dataclass(frozen=True)
class EarlyStopping(Stopping):
    """Stop when a metric has not improved for a while.

    patience: so many evaluations in a row without a new best. min_delta: what a new best must differ from the old one
    by to count. metric, mode: see `Stopping`.
    """

    patience: int = 20
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1 or not self.min_delta >= 0:
            raise InputError("EarlyStopping takes a patience of 1 or more and a min_delta of 0 or more")

    def verdict(self, values: list[float]) -> str:
        """Whether patience ran out at some point."""
        best, waited = -math.inf, 0
        for value in values:
            score = self.sign * value
            best, waited = (score, 0) if score > best + self.min_delta else (best, waited + 1)
            if waited == self.patience:
                return f"{self.metric} has not improved on {self.sign * best:.4g} in {waited} evaluations"
        return ""


@dataclass(frozen=True)
class TargetStopping(Stopping):
    """Stop when a metric, or its mean over the last few evaluations, has reached a target.

    average: how many evaluations the mean is over. metric, mode: see `Stopping`.
    """

    target: float = 0.8
    average: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average < 1 or not math.isfinite(self.target):
            raise InputError("TargetStopping takes a finite target and an average over 1 evaluation or more")

    def verdict(self, values: list[float]) -> str:
        """Whether the target was reached at some point."""
        for last in range(self.average, len(values) + 1):
            mean = math.fsum(values[last - self.average : last]) / self.average
            if self.sign * mean >= self.sign * self.target:
                over = f" over {self.average} evaluations" if self.average > 1 else ""
                return f"{self.metric} {mean:.4g}{over} has reached {self.target:g}"
        return ""
