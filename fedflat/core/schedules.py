"""How the learning rate changes over the rounds and within them: `Experiment(lr_schedule="warmup(rounds=5)+cosine")`.

A schedule is a factor of `Experiment.lr`; the factors of several schedules are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.specs import build, parse_sum


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate. The rounds are t = 0, 1, …, T − 1 here, the steps of a round k = 0, …, K − 1."""

    def of_round(self, t: int, e: Experiment) -> float:
        """The factor at the beginning of a round."""
        return 1.0

    def of_step(self, t: int, k: int, steps: int, e: Experiment) -> float:
        """The factor of a step, on top of its round's."""
        return 1.0


@dataclass(frozen=True)
class Constant(Schedule):
    """The same learning rate all the time."""


@dataclass(frozen=True)
class Decay(Schedule):
    """lr · lr_decay^t, with the experiment's `lr_decay`: a little less in every round."""

    def of_round(self, t: int, e: Experiment) -> float:
        """See `Schedule`."""
        return float(e.lr_decay**t)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from lr in the first round to nearly `final` · lr in the last.

    Args:
        final: The share of the learning rate to which it falls after round T.
    """

    final: float = 0.0

    def of_round(self, t: int, e: Experiment) -> float:
        """See `Schedule`."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * t / e.rounds)) / 2


@dataclass(frozen=True)
class Warmup(Schedule):
    """A straight line up to lr over the first rounds.

    Args:
        rounds: The round from which the learning rate is whole.
    """

    rounds: int = 5

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"warmup: rounds must be 1 or more, not {self.rounds}")

    def of_round(self, t: int, e: Experiment) -> float:
        """See `Schedule`."""
        return min(1.0, (t + 1) / self.rounds)


@dataclass(frozen=True)
class Poly(Schedule):
    """lr · (1 − progress)^power, step by step.

    Args:
        power: How fast the learning rate falls.
        horizon: What the progress is counted over: "run" (all rounds), "round" (it begins anew in every round), or
            "feddrive", 10,000 rounds that begin anew in every round: FedDrive's code, practically constant.
    """

    power: float = 0.9
    horizon: Literal["run", "round", "feddrive"] = "run"

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise InputError(f"poly: power must be 0 or more, not {self.power}")

    def of_round(self, t: int, e: Experiment) -> float:
        """See `Schedule`."""
        return float((1 - t / e.rounds) ** self.power) if self.horizon == "run" else 1.0

    def of_step(self, t: int, k: int, steps: int, e: Experiment) -> float:
        """See `Schedule`."""
        whole = {"run": e.rounds - t, "round": 1, "feddrive": 10_000}[self.horizon]
        return float((1 - k / (whole * steps)) ** self.power)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "decay": Decay,
    "cosine": Cosine,
    "warmup": Warmup,
    "poly": Poly,
}
"""The schedules by name."""


@cache
def schedules(text: str) -> tuple[Schedule, ...]:
    """The schedules that a string such as "warmup(rounds=5)+cosine" names."""
    return tuple(build("learning-rate schedule", call, SCHEDULES) for call in parse_sum(text))


def round_factor(e: Experiment, t: int) -> float:
    """The factor of the learning rate in round t = 0, 1, …"""
    return math.prod(schedule.of_round(t, e) for schedule in schedules(e.lr_schedule))


def varies_within(text: str) -> bool:
    """Whether the learning rate changes within a round."""
    return any(type(schedule).of_step is not Schedule.of_step for schedule in schedules(text))
