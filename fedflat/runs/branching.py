"""Runs of a series that begin alike: the rounds that they have in common are run once, and copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedflat.core.method import Method
from fedflat.errors import FedflatError
from fedflat.experiment import Experiment
from fedflat.runs.callbacks import Callback

if TYPE_CHECKING:
    from fedflat.runs.result import Run

log = logging.getLogger(__name__)


def common_rounds(one: Experiment, other: Experiment) -> int:
    """How many rounds, from the first one, two experiments have in common bit for bit; 0 if that is not known.

    They differ in parts that begin later, such as the averaging of SWA, and in nothing else.

    >>> e = Experiment(method="sam", rounds=100)
    >>> [common_rounds(e, e.replace(method=m)) for m in ("sam+swa", "sam+swa(start=0.5)", "asam+swa")]
    [75, 50, 0]
    """
    if one.replace(method=other.method) != other or one.stack == "auto" or one.backend == "ray":
        return 0  # `auto` may pick another size for each; states in a cluster stay with their run
    late = set(Method.parse(one.method).parts) ^ set(Method.parse(other.method).parts)
    return min((part.idle_rounds(one.rounds) for part in late), default=0)


def leaders(experiments: Sequence[Experiment]) -> dict[int, int]:
    """Who copies from whom, by place: each experiment from the first one that has rounds in common with it.

    >>> e = Experiment(method="sam", rounds=100)
    >>> leaders([e, e.replace(seed=1), e.replace(method="sam+swa")])
    {2: 0}
    """
    alike, found = dict[Experiment, list[int]](), dict[int, int]()
    for place, e in enumerate(experiments):
        earlier = alike.setdefault(e.replace(method="fedavg"), [])
        first = next((p for p in earlier if p not in found and common_rounds(experiments[p], e)), None)
        found |= {} if first is None else {place: first}
        earlier.append(place)
    return found


class Follower(NamedTuple):
    """A run to begin with the rounds of another one: its experiment, run folder and preset."""

    experiment: Experiment
    folder: Path
    preset: str


class Branching(Callback):
    """Begins other runs when this one has done the rounds that it has in common with them.

    Args:
        followers: The other runs.
        begin: See `runner.begin`.
    """

    def __init__(self, followers: Sequence[Follower], begin: Callable[..., None]) -> None:
        self._followers, self._begin = followers, begin
        self._due: dict[int, list[Follower]] = {}

    def start(self, run: Run) -> None:
        """Find out when."""
        for follower in self._followers:
            self._due.setdefault(common_rounds(run.experiment, follower.experiment), []).append(follower)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Begin those whose time has come; give this callback last, as others may add to the row of the round."""
        for experiment, folder, preset in self._due.get(metrics["round"], ()):
            run._state.write_metrics()
            try:
                self._begin(experiment, run._state, folder, preset)
            except FedflatError as error:
                log.warning("%s will run the rounds that it has in common with %s itself: %s", folder, run.out, error)
