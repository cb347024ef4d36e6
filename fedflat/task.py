"""What a worker is given: the task of a whole run, and a client's job in a round of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fedflat.data.federation import Federation
from fedflat.experiment import Experiment
from fedflat.flat import FlatModel
from fedflat.method import Method, Part, State
from fedflat.private import Private

Criterion = Callable[[Any, Tensor], Tensor]


@dataclass
class Task:
    """What every worker holds for the whole run."""

    experiment: Experiment
    method: Method
    model: FlatModel
    federation: Federation
    criterion: Criterion
    uniform: bool
    private: Private
    evaluator: Part | None = None
    """The part whose average is evaluated; None is the server's own weights."""
    interference_every: int = 0
    """Rounds between evaluations of the clients that are asked for by watching, beside the experiment's own."""
    sampled: bool = True
    """Whether `participation` draws who trains; False where the user says it, and nothing is known of chance."""
    deployed: bool = False
    """Whether clients are machines of their own: a round in which none is heard is void, and no error."""

    @property
    def clients(self) -> int:
        """How many clients may train; the federation's last ones may be there to be evaluated only."""
        return len(self.federation) - self.experiment.new_clients

    @cached_property
    def samples(self) -> np.int64:
        """Samples of all clients that may train; summed once, as there may be millions."""
        total: np.int64 = self.federation.sizes[: self.clients].sum()
        return total

    def share(self, client: int) -> float:
        """Relative size of a client, ω_i."""
        return float(self.clients * self.federation.size(client) / self.samples)

    def floats(self, extra: Iterable[Mapping[str, Tensor]]) -> int:
        """Numbers in a message of weights, statistics and `extra`, less what stays with the clients."""
        statistics = self.model.buffers.numel() - len(self.private.buffers)
        tensors = (self.model.theta, *(tensor for state in extra for tensor in state.values()))
        return statistics + sum(self.private.floats(tensor) for tensor in tensors)

    def receive(self, job: Job) -> Tensor:
        """Load what was sent and what the client has kept of its own; returns the weights from which it starts."""
        load_weights(self.model, job.theta, job.buffers, job.counters)
        if not self.private:
            return job.theta
        self.private.load(self.model, job.states.get(Private.KEY, {}))
        return self.model.theta.clone()


@dataclass
class Job:
    """One client's work in one round. `weight` is its share of the combined update, `duty` what it is asked to do."""

    round: int
    client: int
    lr: float
    weight: float
    theta: Tensor
    buffers: Tensor
    counters: Tensor
    received: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    duty: str = "train"


def load_weights(model: FlatModel, theta: Tensor, buffers: Tensor, counters: Tensor) -> None:
    """Copy weights and buffers into a model."""
    model.theta.copy_(theta)
    model.buffers.copy_(buffers)
    model.counters.copy_(counters)
