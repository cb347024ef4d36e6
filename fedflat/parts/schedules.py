"""Learning rates that change within a round, as `Experiment.lr_schedule` says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedflat.core.part import Part
from fedflat.core.schedules import schedules, varies_within
from fedflat.core.views import Local


@dataclass(frozen=True)
class StepSchedule(Part):
    """The factors of the experiment's schedules in each local step."""

    def step_rate(self, local: Local, step: int, steps: int) -> float:
        e, t = local.experiment, local.round - 1
        return math.prod(schedule.of_step(t, step, steps, e) for schedule in schedules(e.lr_schedule))


def step_schedules(text: str) -> tuple[Part, ...]:
    """The part that changes the learning rate within rounds; none if it stays the same."""
    return (StepSchedule(),) if varies_within(text) else ()
