"""What the slots of a part see: one client's round (`Local`), the server (`Server`), and a client's `Update`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.devices import CPU, hosted, moved
from fedflat.core.flat import FlatModel
from fedflat.core.optimizers import Optimizer
from fedflat.core.private import Private
from fedflat.core.rows import Number, add_, clip_, each
from fedflat.core.samples import ClientData
from fedflat.core.tensors import State
from fedflat.experiment import Experiment


class Named(Protocol):
    """What the loops need to know of a part to keep its state and its messages; see `Part`."""

    @property
    def name(self) -> str: ...

    @property
    def simulation_only(self) -> bool: ...

    @property
    def hides_participation(self) -> bool: ...


class SetupView(Protocol):
    """What `check`, `client_metrics` and `round_metrics` may read; `engine.setup.Setup` describes the fields."""

    experiment: Experiment
    model: FlatModel
    private: Private
    uniform: bool
    sampled: bool

    @property
    def parts(self) -> Sequence[Named]: ...

    @property
    def evaluator(self) -> Named | None: ...

    @property
    def federation(self) -> ClientData: ...

    @property
    def criterion(self) -> Callable[[Any, Tensor], Tensor]: ...

    @property
    def clients(self) -> int: ...


class Batch(NamedTuple):
    """One minibatch. `targets` are pairs (weight, labels): usually one, two if samples are mixed."""

    x: Any
    targets: tuple[tuple[Number, Tensor], ...]


class Local:
    """One client's round, as the parts see it; or several in lockstep, with one row per client: see `Stack`.

    Attributes:
        theta, grad: The model's weights and gradient, changed in place.
        origin: The weights from which the update and all pulls are measured: those received, unless a part puts others
            in their place in `begin`; read-only.
        given: The model received this round, for what looks at it: teachers, losses, directions; read-only. A part that
            chooses among several received models puts the chosen one here in `begin`.
        round, client: The current round (from 1) and client (from 0).
        rounds, clients: The number of rounds and of clients.
        lr: Learning rate of the round.
        steps: Local steps done so far.
        rate: The factor of the learning rate in the current step; 1 unless a part fills `step_rate`.
        weighted_steps: Σ_k η_k / η_l, the steps done so far weighted by their `rate`. Divide by `weighted_steps * lr`
            where a formula has K_i η_l.
        samples: n_i, the client's number of samples.
        uniform: Whether means over clients are unweighted.
        weight_decay: L2 penalty of the optimiser.
        sent_decay: Additional L2 penalty for the weights that are sent. A part adds to it in `begin`.
        proximal: Sum of the strengths μ of all terms μ (w_k − w) in the corrections. A part that pulls towards the
            received weights adds its μ in `begin`; normalised averaging (`fednova`) uses it to count steps.
        optimizer: The experiment's optimiser.
        optimizer_state: What the optimiser remembers of the current trajectory, by name: the momentum of `sgd` is
            "velocity". A part may set it in `begin` for the first `fit`; None: it starts afresh.
        full_gradient: Computes the gradient of the data loss at given weights, over all samples.
        full_loss: Computes the data loss at given weights, over all samples, in evaluation mode.
        label_counts: Counts the client's training samples of every class, given the number of classes.
        features, data_loss: Results of the current forward pass, for loss terms. Features need a part that enters
            `model.capture_features` around the pass.
        batch: The current minibatch.
        branch: Name of the trajectory being trained; "global" is the one whose result is sent.
        only: Mask of the coordinates that the current `fit` trains; None: all.
        active: Mask of the rows of the clients that have not finished; None: all.
        shared: Mask of the weights that are exchanged with the server; None: all.
        sent: {part: {name: tensor}} to send to the server with the update.
    """

    def __init__(
        self,
        model: FlatModel,
        origin: Tensor,
        *,
        experiment: Experiment,
        round: int,
        client: int,
        clients: int,
        samples: int,
        share: Callable[[], float],
        lr: float,
        uniform: bool,
        optimizer: Optimizer,
        states: dict[str, State],
        received: Mapping[str, Mapping[str, Tensor]],
        criterion: Callable[[Any, Tensor], Tensor],
    ) -> None:
        self.model, self.origin, self.given = model, origin, origin
        self.theta, self.grad = model.theta, model.grad
        self.experiment, self.round, self.rounds = experiment, round, experiment.rounds
        self.client, self.clients = client, clients
        self.samples: Number = samples
        self.lr, self.uniform = lr, uniform
        self.optimizer, self.weight_decay = optimizer, optimizer.weight_decay or 0.0
        self.full_gradient: Callable[[Tensor], Tensor] = _no_loop
        self.full_loss: Callable[[Tensor], Tensor] = _no_loop
        self.label_counts: Callable[[int], Tensor] = _no_loop
        self.states, self._received, self._share, self._criterion = states, received, share, criterion
        self.sent: dict[str, State] = {}
        self._simulated: set[str] = set()
        self._scratch: dict[str, dict[str, Any]] = {}
        self._streams: dict[str, np.random.Generator] = {}

    # Before the first step; the same for everybody, so that no client is given a copy.
    branch: str = "global"
    steps: Number = 0
    weighted_steps: Number = 0.0
    rate: Number = 1.0
    sent_decay: Number = 0.0
    proximal: Number = 0.0
    optimizer_state: State | None = None
    batch: Batch = Batch(None, ())
    only: Tensor | None = None
    active: Tensor | None = None
    shared: Tensor | None = None
    features: Tensor | None = None
    data_loss: Tensor | None = None
    count = 1
    """The number of clients."""
    running = 1
    """The first so many of them have not finished; all those that follow have."""

    @property
    def members(self) -> Sequence[Local]:
        """The clients one by one: this one."""
        return (self,)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the clients: of this one."""
        return (self.client,)

    @property
    def held(self) -> Sequence[int]:
        """How many samples the clients have: this one."""
        return (int(self.samples),)

    @property
    def share(self) -> Number:
        """Relative size of this client, ω_i = N·n_i / Σ_j n_j (1 if all sizes are equal)."""
        return self._share()

    @property
    def mean_rate(self) -> Number:
        """The mean of `rate` over the steps done so far."""
        return each(lambda weighted, steps: weighted / steps if steps else 1.0, self.weighted_steps, self.steps)

    def loss_of(self, output: Any) -> Tensor:
        """The mean data loss of the current minibatch; if samples are mixed, the weighted sum over their labels."""
        targets = self.batch.targets
        if len(targets) == 1:
            return self._criterion(output, targets[0][1])
        return torch.stack([weight * self._criterion(output, y) for weight, y in targets]).sum()

    def state(self, part: Named) -> State:
        """What `part` keeps for this client between rounds; empty when the client first participates."""
        return self.states.setdefault(part.name, {})

    def received(self, part: Named) -> Mapping[str, Tensor]:
        """What `part` broadcast this round; read-only."""
        return self._received.get(part.name, {})

    def send(self, part: Named, **tensors: Tensor) -> None:
        """Send named tensors to the server, where `server.total(part)` holds their sums over the participants."""
        self.sent.setdefault(part.name, {}).update(tensors)
        if part.simulation_only:
            self._simulated.add(part.name)

    @property
    def messages(self) -> dict[str, State]:
        """The communication in `sent`: without what only serves the simulation."""
        return {name: state for name, state in self.sent.items() if name not in self._simulated}

    def exchanged(self, vector: Tensor) -> Tensor:
        """The vector, with zeros where weights stay with the client: what a server says of those means nothing."""
        return vector if self.shared is None else vector * self.shared

    def scratch(self, part: Named) -> dict[str, Any]:
        """Storage of `part` between slots of the same round."""
        return self._scratch.setdefault(part.name, {})

    def numpy_stream(self, purpose: str) -> np.random.Generator:
        """A NumPy generator of (seed, purpose, round, client); restarted by every `fit`, shared by its steps."""
        if purpose not in self._streams:
            self._streams[purpose] = streams.numpy_stream(
                self.experiment.seed, streams.of_part(purpose), self.round, self.client
            )
        return self._streams[purpose]

    def start_branch(self, branch: str, only: Tensor | None = None) -> None:
        """Begin a trajectory. It repeats the same random draws, so that two branches of a round can be compared."""
        self.branch, self.only = branch, only
        self._streams.clear()

    def descend(self, theta: Tensor, grad: Tensor, state: State) -> None:
        """One step of the experiment's optimiser (mask, clip, weight decay, direction); overwrites `grad`.

        Args:
            theta: The weights to move, of this client's model or of another trajectory.
            grad: Their gradient.
            state: The optimiser's, as `start_optimizer` began it.
        """
        optimizer, only, rate = self.optimizer, self.only, self.rate
        if only is not None:
            grad.mul_(only)
        if self.experiment.clip is not None:
            clip_(grad, self.experiment.clip)
        weights = theta if only is None else theta * only
        penalty = self.sent_decay if theta is self.theta and self.branch == "global" else 0.0
        if not optimizer.decoupled:
            penalty = self.weight_decay + penalty
        if isinstance(penalty, Tensor) or penalty:
            add_(grad, weights, penalty)
        before = {} if self.active is None else {name: tensor.clone() for name, tensor in state.items()}
        step = optimizer.direction(grad, state)
        if optimizer.decoupled and self.weight_decay:
            add_(step, weights, self.weight_decay)
        if only is not None:
            step = step * only  # what the state holds of other coordinates must not move them
        if self.active is not None:
            for name, tensor in state.items():
                torch.where(self.active, tensor, before[name], out=tensor)
            if self.running < self.count:
                theta, step, rate = theta[: self.running], step[: self.running], self._first(rate)
            else:
                step = step.masked_fill(~self.active, 0)
        add_(theta, step, -self.lr * rate)

    def _first(self, number: Number) -> Number:
        return number[: self.running] if isinstance(number, Tensor) else number

    def take_batch(self, batch: Batch, sizes: Sequence[int]) -> None:
        """The minibatch of the next step. `sizes` are its samples per client; 0: the client has finished."""
        self.batch = batch

    def take_rates(self, rates: Sequence[float]) -> None:
        """The factors of the members' learning rates in the current step become this one's."""
        self.rate = rates[0]

    def count_step(self) -> None:
        """A step of the current branch is done."""
        if self.branch == "global":
            self.steps, self.weighted_steps = self.steps + 1, self.weighted_steps + self.rate

    def start_optimizer(self) -> State:
        """The optimiser's state with which a trajectory starts, for `descend`."""
        return self.optimizer.start(self.theta)

    @contextmanager
    def displaced(self, by: Tensor, *, track_buffers: bool = False) -> Iterator[None]:
        """Run the block at `theta + by`; afterwards `theta` is restored bit for bit.

        Unless `track_buffers` is set, BatchNorm's running statistics are restored as well.
        """
        saved = self.theta.clone()
        buffers, counters = self.model.buffers.clone(), self.model.counters.clone()
        self.theta.add_(by)
        try:
            yield
        finally:
            self.theta.copy_(saved)
            if not track_buffers:
                self.model.buffers.copy_(buffers)
                self.model.counters.copy_(counters)


def _no_loop(*_: object) -> Tensor:
    raise NotImplementedError("only the local loop knows the client's samples")


class Server:
    """The server between two rounds, as the parts see it.

    Attributes:
        theta: The server's weights. They are sent next, unless a part fills `outgoing` or `generate`.
        origin: The weights that were sent this round.
        before: The server's weights before this round's step; `origin`, unless a part fills `outgoing`.
        delta: The combined update.
        round: The round being run (from 1).
        rounds, clients: The number of rounds and of clients.
        asked, participants: How many clients were asked to train this round, and how many returned a usable update.
        sampled: Whether `Experiment.participation` draws the participants; otherwise their distribution is unknown.
        lr: The clients' learning rate of the round.
        server_lr: The server's learning rate.
        steps: Mean number of local steps of this round's participants.
        weighted_steps: The same, with every step weighted by its share of `lr`; see `Local.weighted_steps`.
        samples: Number of samples of this round's participants.
        uniform: Whether means over clients are unweighted.
        trusted: The update of the server's own clean samples, if a part asks for it (`trusted_samples`).
        model: Describes the coordinates of `theta`; do not use the weights in it.
    """

    def __init__(self, model: FlatModel, experiment: Experiment, clients: int) -> None:
        self.model = model
        self.theta, self.buffers, self.counters = model.theta.clone(), model.buffers.clone(), model.counters.clone()
        self.origin, self.before, self.delta = self.theta, self.theta, torch.zeros_like(self.theta)
        self.round, self.rounds, self.clients, self.participants = 0, experiment.rounds, clients, 0
        self.experiment, self.lr, self.server_lr = experiment, experiment.lr, experiment.server_lr
        self.uniform, self.sampled = False, True
        self.asked, self.samples, self.steps, self.weighted_steps = 0, 0, 0.0, 0.0
        self.trusted = torch.zeros_like(self.theta)
        self.states: dict[str, State] = {}
        self.totals: dict[str, State] = {}

    @property
    def mean_rate(self) -> float:
        """The mean of `Local.rate` over the steps of this round's participants."""
        return self.weighted_steps / self.steps if self.steps else 1.0

    def state(self, part: Named) -> State:
        """What `part` keeps on the server between rounds."""
        return self.states.setdefault(part.name, {})

    def total(self, part: Named) -> Mapping[str, Tensor]:
        """Sums over this round's participants of what `part` sent."""
        return self.totals.get(part.name, {})


EMPTY, EMPTY_COUNTERS = torch.empty(0), torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Update:
    """What one client returns. The defaults are those of a client that was only evaluated.

    Attributes:
        weight: The client's weight in the combined update.
        weighted_steps: See `Local`.
        delta: The update; empty if it is only summed, see `engine.terms`.
        sent: {part: {name: tensor}} sent with the update.
        states: What the client keeps from now on.
        failure: Why the update cannot be used; None if it can.
        metrics: Named numbers for the client's row in the records.
        norm: Euclidean norm of `delta`.
        floats: How many numbers are sent.
    """

    client: int
    samples: int
    seconds: float
    weight: float = 0.0
    steps: int = 0
    weighted_steps: float = 0.0
    loss: float = math.nan
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    floats: int = 0
    delta: Tensor = EMPTY
    buffers: Tensor = EMPTY
    counters: Tensor = EMPTY_COUNTERS
    sent: dict[str, State] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)

    def hosted(self) -> Update:
        """The update in the host's memory; itself if it is there."""
        if self.delta.is_cpu and self.buffers.is_cpu:
            return self
        delta, buffers, counters = (hosted(vector) for vector in (self.delta, self.buffers, self.counters))
        sent, states = moved(self.sent, CPU), moved(self.states, CPU)
        return replace(self, delta=delta, buffers=buffers, counters=counters, sent=sent, states=states)
