"""One method in one setting of a leaderboard, from the search to its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.experiment import Experiment
from fedflat.runs.records import Record

BASELINE = "fedavg"


@dataclass
class Entry:
    """One method in one setting.

    Attributes:
        method: As it is named in the table.
        chosen: With the learning rate and the value that the search found best.
        records: Finished runs, one per seed.
        searched: Accuracy on the validation samples by experiment that was tried.
        failure: Why there is no result; empty if there is one.
        curvature: Headline figures of the first seed's Hessian.
        time: Seconds of a round's training ÷ those of FedAvg.
    """

    setting: str
    method: str
    chosen: Experiment | None = None
    records: list[Record] = field(default_factory=list)
    searched: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    curvature: Mapping[str, float] = field(default_factory=dict)
    time: float | None = None

    @property
    def folder(self) -> Path:
        """The run folder of the first seed."""
        path = self.records[0].path
        assert path is not None
        return path
