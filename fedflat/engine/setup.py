"""What every worker holds for a whole run (`Setup`), and what it is given for clients (`Broadcast` and `Jobs`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.core import streams
from fedflat.core.devices import CPU, kind_of, moved, on
from fedflat.core.flat import FlatModel
from fedflat.core.method import Method
from fedflat.core.part import Part
from fedflat.core.private import Private
from fedflat.core.samples import Samples
from fedflat.core.tensors import State
from fedflat.core.views import Server
from fedflat.data.federation import Federation
from fedflat.data.on_device import OnDevice
from fedflat.experiment import Experiment
from fedflat.tasks import Metric

LOOK = 16  # clients whose sizes are asked for
SMALL, MOST = 1 << 19, 6  # weights times samples of the clients that travel together, and at most 2^MOST of them
Split = Literal["test", "client_test", "train"]
Criterion = Callable[[Any, Tensor], Tensor]


@dataclass
class Broadcast:
    """What every participant of a round receives. `received` is {part: {name: tensor}}, sent with the weights."""

    round: int
    lr: float
    theta: Tensor
    buffers: Tensor
    counters: Tensor
    received: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> Broadcast:
        """The same on a device."""
        theta, buffers, counters = (on(tensor, device) for tensor in (self.theta, self.buffers, self.counters))
        return Broadcast(self.round, self.lr, theta, buffers, counters, moved(self.received, device))


@dataclass
class Job:
    """One client's work in a round.

    Attributes:
        kind: What the client does: a name in `engine.jobs.JOBS`.
        weight: The client's weight in the combined update.
        states: What the client has kept so far.
        theta: Weights for this client only, instead of the broadcast ones.
    """

    client: int
    kind: str = "train"
    weight: float = 0.0
    states: Mapping[str, State] = field(default_factory=dict)
    theta: Tensor | None = None

    def on(self, device: torch.device) -> Job:
        """The same on a device."""
        theta = None if self.theta is None else on(self.theta, device)
        return replace(self, states=moved(self.states, device), theta=theta)


Own = Callable[[int], tuple[Mapping[str, State], Tensor | None]]
"""What a client has of its own: states and weights, as in `Job`."""


class Jobs(Sequence[Job]):
    """Jobs of one kind. Most clients are given nothing but a number and a weight, and then no `Job` is made.

    Args:
        kind: See `Job`.
        clients: The clients.
        weights: Their weights.
        own: What a client has of its own, asked for once when a block of jobs is made; None: nobody has anything.
    """

    def __init__(self, kind: str, clients: Sequence[int], weights: Sequence[float], own: Own | None = None) -> None:
        self.kind, self.clients, self.weights = kind, clients, weights
        self._own = own

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Jobs:
        """Jobs that are there."""
        own = {job.client: (job.states, job.theta) for job in jobs}
        some = any(job.states or job.theta is not None for job in jobs)
        columns = [job.client for job in jobs], [job.weight for job in jobs]
        return cls(jobs[0].kind if jobs else "", *columns, own.__getitem__ if some else None)

    @property
    def plain(self) -> bool:
        """Whether no client has anything of its own."""
        return self._own is None

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> Job: ...
    @overload
    def __getitem__(self, place: slice) -> Jobs: ...
    def __getitem__(self, place: int | slice) -> Job | Jobs:
        if isinstance(place, slice):
            return Jobs(self.kind, self.clients[place], self.weights[place], self._own)
        client = self.clients[place]
        states, theta = ({}, None) if self._own is None else self._own(client)
        return Job(client, self.kind, self.weights[place], states, theta)

    def blocks(self, size: int) -> Iterator[Jobs]:
        """Consecutive jobs, `size` at a time, with what their clients have of their own.

        >>> [block.clients for block in Jobs("train", [4, 2, 9], [0.5, 0.3, 0.2]).blocks(2)]
        [[4, 2], [9]]
        """
        for start in range(0, len(self), size):
            block = self[start : start + size]
            yield block if block.plain else Jobs.of(list(block))

    def on(self, device: torch.device) -> Jobs:
        """The same on a device."""
        return self if self.plain else Jobs.of([job.on(device) for job in self])


@dataclass(frozen=True)
class Chunk:
    """A piece of evaluation: samples start…stop of a split (of one client, or of one of the federation's test sets).

    Attributes:
        test: The name of the test set; empty for the common one.
        domain: Count only the samples of this domain; empty for all.
        by_batch: Whether statistics that stay with the clients are replaced by those of the batch.
    """

    split: Split
    client: int
    start: int
    stop: int
    test: str = ""
    domain: str = ""
    by_batch: bool = True


@dataclass
class Setup:
    """Experiment, method, model and data of a run, checked against each other.

    Attributes:
        criterion: The loss: a function of (output, y), a mean over the batch.
        metrics: What is measured besides the loss.
        sum_shapes: The shapes of the metrics' sums, by `Metric.key`.
        lead: The metric that decides which round is the best: the first one measured, else the loss.
        uniform: Whether means over clients are unweighted.
        private: The tensors of the model that stay with the clients.
        evaluator: The part whose weights are evaluated; None: the server's own weights.
        interference_every: Rounds between the clients' evaluations that observers need; 0: none.
        sampled: Whether `participation` draws the participants; False if the user chooses them.
        stack: How many clients a worker trains in lockstep; see `engine.stacking`.
        pads: Whether minibatches of a stack may be filled up to the same size.
        folds: Whether a stack computes the network by `core.folded`, and the data loss alone.
        ahead: Samples and minibatches of clients, where they were made ahead of training.
        draws: Whether clients draw from the global generators, which are then seeded for each of them; None: unknown.
        deployed: Whether clients are separate machines: a round without any update is then void, not an error.
        devices: The devices that the experiment names. `on` gives the setup of one of them; the server's own setup,
            and all that it sums and keeps, is on the CPU.
    """

    experiment: Experiment
    method: Method
    model: FlatModel
    federation: Federation
    criterion: Criterion
    uniform: bool
    private: Private
    evaluator: Part | None = None
    metrics: Sequence[Metric] = ()
    lead: str = "loss"
    sum_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    interference_every: int = 0
    sampled: bool = True
    stack: int = 1
    pads: bool = False
    folds: bool = False
    ahead: dict[int, tuple[Samples, list[tuple[Any, Tensor]]]] = field(default_factory=dict)
    draws: bool | None = None
    deployed: bool = False
    devices: tuple[torch.device, ...] = (CPU,)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.theta.device

    def on(self, device: torch.device) -> Setup:
        """The same with model, loss and data on a device, for the process that computes there."""
        if device == self.device:
            return self
        workers = self.experiment.workers or kind_of(device).workers_per_device or 1
        model, criterion = self.model.on(device), self.criterion
        if isinstance(criterion, nn.Module):
            criterion = copy.deepcopy(criterion).to(device)
        private = Private(model, self.private.names, self.private.splits)
        federation = OnDevice(self.federation, device, self.experiment.data_share / workers)
        return replace(self, model=model, criterion=criterion, private=private, federation=federation)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The method's parts."""
        return self.method.parts

    @property
    def falls(self) -> bool:
        """Whether less of the leading metric is better."""
        return next((metric.falls for metric in self.metrics if metric.name == self.lead), self.lead == "loss")

    @property
    def clients(self) -> int:
        """Number of clients that may train; the last ones of the federation may be only evaluated."""
        return len(self.federation) - self.experiment.new_clients

    @cached_property
    def samples(self) -> np.int64:
        """Number of samples of all clients that may train; summed once, as there may be millions of clients."""
        total: np.int64 = self.federation.sizes[: self.clients].sum()
        return total

    @cached_property
    def block(self) -> int:
        """How many clients travel to a worker together: a stack, or several small clients.

        Without stacks it is a power of two, so that a worker may add their terms along the tree of `TreeSum`.
        """
        if self.stack > 1:
            return self.stack
        e, looked_at = self.experiment, range(min(self.clients, LOOK))  # not all: there may be millions
        mean = max(1.0, sum(map(self.federation.size, looked_at)) / len(looked_at))
        seen = mean * e.local_epochs if e.local_steps is None else e.local_steps * min(e.batch_size or mean, mean)
        return 1 << max(0, min(MOST, math.floor(math.log2(SMALL / max(1.0, seen * self.model.size)))))

    def share(self, client: int) -> float:
        """Relative size of a client, ω_i."""
        return float(self.clients * self.federation.size(client) / self.samples)

    def floats(self, extra: Iterable[Mapping[str, Tensor]]) -> int:
        """How many numbers a message with weights, statistics and `extra` has, without what stays with the clients."""
        statistics = self.model.buffers.numel() - len(self.private.buffers)
        tensors = (self.model.theta, *(tensor for state in extra for tensor in state.values()))
        return statistics + sum(self.private.floats(tensor) for tensor in tensors)

    def seed_global(self, purpose: str, round: int, client: int) -> None:
        """Seed the global generators for a client, unless nothing draws from them."""
        if self.draws is not False:
            streams.seed_global(self.experiment.seed, purpose, round, client)

    def load(self, broadcast: Broadcast, theta: Tensor | None = None) -> None:
        """Copy the broadcast weights (or `theta` instead of them) and buffers into the model."""
        model = self.model
        model.theta.copy_(broadcast.theta if theta is None else theta)
        if model.buffers.numel():
            model.buffers.copy_(broadcast.buffers)
        if model.counters.numel():
            model.counters.copy_(broadcast.counters)

    def receive(self, broadcast: Broadcast, job: Job) -> Tensor:
        """Load what was sent and what the client has kept; returns the weights from which it starts."""
        self.load(broadcast, job.theta)
        if not self.private:
            return broadcast.theta if job.theta is None else job.theta
        self.private.load(self.model, job.states.get(Private.KEY, {}))
        return self.model.theta.clone()


def fresh_server(setup: Setup) -> Server:
    """The server before the first round."""
    return Server(setup.model, setup.experiment, setup.clients)
