"""What a method is: a sum of parts, each filling a few slots of the one local loop and the one round loop.

`Part` lists the slots in the order in which they are called. `Local` and `Server` are what the slots see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedflat import streams
from fedflat.errors import InputError
from fedflat.flat import FlatModel
from fedflat.sums import Shares, TreeSum

if TYPE_CHECKING:
    from fedflat.data import Samples
    from fedflat.experiment import Experiment
    from fedflat.task import Task

State = dict[str, Tensor]
"""Named tensors that one part keeps for one client, or on the server."""


def copied(states: Mapping[str, State]) -> dict[str, State]:
    """{part: {name: tensor}} with copies of the tensors."""
    return {part: {name: tensor.clone() for name, tensor in state.items()} for part, state in states.items()}


@dataclass
class Batch:
    """One minibatch. `targets` are weighted labels: one pair as a rule, two once samples are mixed."""

    x: Any
    targets: tuple[tuple[float, Tensor], ...]


class Local:
    """One client's round, as the parts see it.

    theta, grad: the model's weights and gradient, changed in place.
    origin: the weights received this round; never to be written to.
    round, client: where we are (rounds count from 1). rounds, clients: how many there are.
    lr: learning rate of the round. steps: local steps done so far. samples: n_i. uniform: plain means over clients.
    weight_decay: L2 of the optimiser. extra_decay: what parts add to it for the weights that are sent, and no others.
    velocity: the momentum buffer, zero when None.
    pull: sum of the parts' proximal strengths. full_gradient: of the data loss at given weights, over all samples.
    features, data_loss: of the current forward pass, for loss terms; features only where a part has asked for them.
    batch: the current minibatch. branch: which trajectory of a method with several is being trained.
    only: the mask of coordinates that the current `fit` trains, None when it trains all.
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
        states: dict[str, State],
        received: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self.model, self.origin = model, origin
        self.theta, self.grad = model.theta, model.grad
        self.experiment, self.round, self.rounds = experiment, round, experiment.rounds
        self.client, self.clients, self.samples = client, clients, samples
        self.lr, self.steps, self.branch, self.uniform = lr, 0, "global", uniform
        self.weight_decay, self.extra_decay = experiment.weight_decay, 0.0
        self.velocity: Tensor | None = None
        self.pull = 0.0
        self.full_gradient: Callable[[Tensor], Tensor] = _no_gradient
        self.batch = Batch(None, ())
        self.only: Tensor | None = None
        self.states, self.sent = states, dict[str, State]()
        self._received, self._share, self._scratch = received, share, dict[str, dict[str, Any]]()
        self._streams: dict[str, np.random.Generator] = {}
        self.features: Tensor | None = None
        self.data_loss: Tensor | None = None

    @property
    def share(self) -> float:
        """Relative size of this client, ω_i = N·n_i / Σ_j n_j (1 when all are equal)."""
        return self._share()

    def state(self, part: Part) -> State:
        """What `part` keeps for this client from round to round; empty at first participation."""
        return self.states.setdefault(part.name, {})

    def received(self, part: Part) -> Mapping[str, Tensor]:
        """What `part` broadcast this round; never to be written to."""
        return self._received.get(part.name, {})

    def send(self, part: Part, **tensors: Tensor) -> None:
        """Send named tensors to the server; there `server.total(part)` holds their sums over the participants."""
        self.sent.setdefault(part.name, {}).update(tensors)

    def scratch(self, part: Part) -> dict[str, Any]:
        """A place for `part` to leave things between slots of the same round; forgotten afterwards."""
        return self._scratch.setdefault(part.name, {})

    def numpy_stream(self, purpose: str) -> np.random.Generator:
        """A NumPy generator of (seed, purpose, round, client); every `fit` starts it anew, its steps go on with it."""
        if purpose not in self._streams:
            self._streams[purpose] = streams.numpy_stream(self.experiment.seed, purpose, self.round, self.client)
        return self._streams[purpose]

    def start_branch(self, branch: str, only: Tensor | None = None) -> None:
        """Begin a trajectory: the same draws again, so that two branches of a round can be compared."""
        self.branch, self.only = branch, only
        self._streams.clear()

    def descend(self, theta: Tensor, grad: Tensor, velocity: Tensor | None = None) -> None:
        """One step of the experiment's optimiser (mask, clip, weight decay, momentum); `grad` is used up."""
        experiment, only = self.experiment, self.only
        if only is not None:
            grad.mul_(only)
        if experiment.clip is not None:
            norm = grad.norm().item()
            if norm > experiment.clip - 1e-6:
                grad.mul_(experiment.clip / (norm + 1e-6))
        sent = theta is self.theta and self.branch == "global"
        decay = self.weight_decay + (self.extra_decay if sent else 0.0)
        if decay:
            grad.add_(theta if only is None else theta * only, alpha=decay)
        if velocity is not None:
            velocity.mul_(experiment.momentum).add_(grad)
            grad = grad.add_(velocity, alpha=experiment.momentum) if experiment.nesterov else velocity
        theta.add_(grad, alpha=-self.lr)

    def fresh_velocity(self) -> Tensor | None:
        """The momentum buffer with which a trajectory starts."""
        return torch.zeros_like(self.theta) if self.experiment.momentum else None

    @contextmanager
    def displaced(self, by: Tensor, *, track_buffers: bool = False) -> Iterator[None]:
        """Run the block at `theta + by`; afterwards `theta` is back bit for bit.

        Passes at a displaced point leave BatchNorm's running statistics alone unless `track_buffers` is set.
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


def _no_gradient(at: Tensor) -> Tensor:
    raise NotImplementedError("only the local loop can compute gradients")


class Server:
    """The server between two rounds, as the parts see it.

    theta: the model that is sent next. origin: the model that was sent this round. delta: the combined update.
    round: the round being run (from 1). rounds, clients: how many there are.
    asked, participants: how many were to train this round, and how many were heard. sampled: whether they were drawn by
    `Experiment.participation`; else nothing is known of chance.
    lr: the clients' learning rate of the round. server_lr: the server's own. uniform: plain means over clients.
    model: tells what the coordinates of `theta` are; its own weights are nobody's in particular.
    """

    def __init__(self, model: FlatModel, experiment: Experiment, clients: int) -> None:
        self.model = model
        self.theta, self.buffers, self.counters = model.theta.clone(), model.buffers.clone(), model.counters.clone()
        self.origin, self.delta = self.theta, torch.zeros_like(self.theta)
        self.round, self.rounds, self.clients, self.participants = 0, experiment.rounds, clients, 0
        self.experiment, self.lr, self.server_lr = experiment, experiment.lr, experiment.server_lr
        self.uniform, self.sampled = False, True
        self.asked, self.steps = 0, 0.0
        self.states: dict[str, State] = {}
        self.totals: dict[str, State] = {}

    def state(self, part: Part) -> State:
        """What `part` keeps on the server from round to round."""
        return self.states.setdefault(part.name, {})

    def total(self, part: Part) -> Mapping[str, Tensor]:
        """Sums over this round's participants of what their `part` sent."""
        return self.totals.get(part.name, {})


@dataclass
class Update:
    """What one client returns: by default that of one which was asked to look, not to train.

    failure: why it cannot be used, if it cannot. figures: for the record. norm: of `delta`. floats: numbers sent.
    shares: what it adds to the round's sums. A worker that has added several clients' itself gives the sum with the
    first of them and None with the others. What nobody looks at for itself is there alone; see `contribution`.
    """

    client: int
    samples: int
    seconds: float
    weight: float = 0.0
    steps: int = 0
    loss: float = math.nan
    delta: Tensor = field(default_factory=lambda: torch.empty(0))
    buffers: Tensor = field(default_factory=lambda: torch.empty(0))
    counters: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sent: dict[str, State] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)
    failure: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    floats: int = 0
    shares: Shares | None = None


Evaluate = Callable[[], Tensor]
Fit = Callable[..., None]


@dataclass(frozen=True)
class Part:
    """One ingredient of a method: a frozen dataclass of hyper-parameters that fills some of the slots below.

    A part keeps nothing in itself: what must last is in `local.state(self)` and `server.state(self)`.
    The order in which parts are written never matters; `rank` orders them where arithmetic does not commute.
    `gradient`, `train`, `combine` and `step` have one owner in a method; every other slot may be filled by many.
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = 0
    uniform: ClassVar[bool] = False
    """Whether the method's identities need plain means over clients (`weighting="auto"`)."""
    everywhere: ClassVar[bool] = False
    """Whether `correct` and `constrain` also act on trajectories other than the global one."""
    needs_mean: ClassVar[bool] = False
    """Whether the server step is only right for plain means, so that no part may claim `combine`."""
    bookkeeping: ClassVar[bool] = False
    """Whether what this part sends serves the simulation only and is no communication."""
    splits: ClassVar[bool] = False
    """Whether what is `private` leaves the server without a complete model, so that there is none to evaluate."""
    adapts: ClassVar[bool] = False
    """Whether a client's own model is the one adapted to it at evaluation."""
    discreet: ClassVar[bool] = False
    """Whether nobody may know what the server draws, nor see in the model that no client was heard."""
    formula: ClassVar[str] = ""
    """What it does, in the paper's symbols and plain characters: shown by reports and by `fedflat list methods`."""
    own_step: ClassVar[str] = ""
    """Said in an error when `server_lr` is set although this part's server step has no use for it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __str__(self) -> str:
        inner = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{self.name}({inner})" if inner else self.name

    def require(self, condition: bool, message: str) -> None:
        """Refuse a hyper-parameter: raise an `InputError` that names this part unless `condition` holds."""
        if not condition:
            raise InputError(f"{self.name}: {message}")

    # ---- once ----
    def build(self, module: nn.Module) -> nn.Module:
        """Change the network itself, as it will be trained, saved and exported; the names of its tensors must stay."""
        return module

    def prepare(self, model: FlatModel) -> None:
        """Hook the model before any training."""

    def private(self, model: FlatModel) -> Iterable[str]:
        """Names of parameters and buffers that stay with the client: its state, never sent, never averaged."""
        return ()

    def check(self, task: Task) -> None:
        """Refuse, or warn about, an experiment, a model or data that this part cannot work with."""

    # ---- client ----
    def begin(self, local: Local) -> None:
        """Start of the client's round: `theta` holds the received weights and may be changed."""

    def train(self, local: Local, fit: Fit) -> None:
        """Run the local loop, `fit(epochs=…, steps=…, only=mask, branch=…)`, as often as is needed. One owner."""
        fit()

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Change the minibatch."""
        return batch

    def watch(self, local: Local) -> AbstractContextManager[Any]:
        """Something to enter around every forward pass."""
        return nullcontext()

    def loss(self, local: Local, output: Any) -> Tensor | None:
        """A term to add to the batch's loss."""
        return None

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """Leave the gradient to follow in `local.grad`; `evaluate()` fills it at the current weights. One owner."""
        evaluate()

    def correct(self, local: Local) -> None:
        """Change `local.grad` in place, at the unperturbed weights, before clipping."""

    def constrain(self, local: Local) -> None:
        """Change `local.theta` in place after the optimiser's step."""

    def end(self, local: Local) -> None:
        """End of the client's round: refresh the client's state, send to the server."""

    def observe(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Named figures to record for this client: look at `theta` as it is sent, and change nothing."""
        return {}

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        """Change the update before it is sent, after `end`; in it, what is `private` is zero and stays so."""
        return delta

    def adapt(self, local: Local, fit: Fit) -> None:
        """Fit the model to a client before it is evaluated there: new clients always, all where `adapts`. One owner."""
        fit(branch="adapt")

    # ---- server ----
    def schedule(self, lr: float, server: Server) -> float:
        """The clients' learning rate of `server.round`, given the one so far."""
        return lr

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        """Named tensors to send to every participant along with the weights."""
        return {}

    def generate(self, server: Server, client: int) -> Tensor:
        """The weights to send to a client instead of the server's own. One owner."""
        return server.theta

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Make one update of many, which arrive one by one in a fixed order. One owner; by default the mean."""
        total, weight = TreeSum(), 0.0
        for update in updates:
            total.add(update.delta * update.weight)
            weight += update.weight
        return total.result().div_(weight)

    def adjust(self, server: Server, delta: Tensor) -> Tensor:
        """Change the combined update before the server step."""
        return delta

    def step(self, server: Server, delta: Tensor) -> None:
        """Move `server.theta` by the combined update. One owner."""
        server.theta = server.theta.add(delta, alpha=server.server_lr)

    def conclude(self, server: Server) -> None:
        """End of the round, after the step."""

    def remark(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Named figures to record for this round, given one row a client heard: change nothing."""
        return {}

    # ---- evaluation ----
    def averaged(self, server: Server) -> Tensor | None:
        """Weights to evaluate instead of `server.theta`, or None while there are none."""
        return None

    def personal(self, state: State, theta: Tensor) -> State | None:
        """A client's own model, given what this part keeps for it and the weights the client would receive.

        Under "theta" its weights, under "buffers" its statistics if it has its own; None while it has no model.
        """
        return None


SINGLE_OWNER = {
    "train": "the passes of local training",
    "gradient": "the rule that makes the gradient",
    "adapt": "the adaptation before evaluation",
    "generate": "the weights that a client receives",
    "combine": "the combination of updates",
    "step": "the server step",
}
SLOTS = (
    *(
        "build",
        "prepare",
        "private",
        "check",
        "begin",
        "train",
        "batch",
        "watch",
        "loss",
        "gradient",
        "correct",
        "constrain",
        "end",
        "observe",
        "upload",
        "adapt",
    ),
    *("schedule", "broadcast", "generate", "combine", "adjust", "step", "conclude", "remark", "averaged", "personal"),
)


class Method:
    """A sum of parts, sorted into the order in which the loops call them.

    >>> from fedflat.method import Method
    >>> str(Method.parse("fedavg"))
    'fedavg'
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: (part.rank, part.name)))
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{name!r} stands twice in the method {'+'.join(names)!r}; give it once")
        self._fillers = {slot: tuple(p for p in self.parts if fills(p, slot)) for slot in SLOTS}
        for slot, what in SINGLE_OWNER.items():
            if len(self._fillers[slot]) > 1:
                first, second = (part.name for part in self._fillers[slot][:2])
                raise InputError(f"{first!r} and {second!r} cannot be combined: both claim {what}")
        for part in self.parts:
            for owner in self._fillers["combine"] if part.needs_mean else ():
                raise InputError(
                    f"{part.name!r} and {owner.name!r} cannot be combined: the server step of {part.name!r} needs the "
                    f"plain mean of the updates, which {owner.name!r} replaces"
                )

    @classmethod
    def parse(cls, text: str | Part | Method) -> Method:
        """Read `"feddc(alpha=0.01)+man"`; a part or a method is taken as it is."""
        if isinstance(text, Method):
            return text
        if isinstance(text, Part):
            return cls([text])
        from fedflat.parts import parse_parts

        parts = parse_parts(text)
        # `fedavg` changes nothing and may come in through several aliases: one is as good as many.
        base = [part for part in parts if part.name == "fedavg"][:1]
        return cls([*base, *(part for part in parts if part.name != "fedavg")])

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def __add__(self, part: Part) -> Method:
        return Method([*self.parts, part])

    def filling(self, slot: str) -> tuple[Part, ...]:
        """The parts that fill `slot`, in order."""
        return self._fillers[slot]

    def owner(self, slot: str) -> Part:
        """The one part that owns `slot`; a plain `Part` with the default behaviour when nobody claims it."""
        return self._fillers[slot][0] if self._fillers[slot] else _DEFAULT

    @property
    def uniform(self) -> bool:
        """Whether `weighting="auto"` means plain means over clients."""
        return any(part.uniform for part in self.parts)


def fills(part: Part, slot: str) -> bool:
    """Whether `part` overrides `slot`."""
    return getattr(type(part), slot) is not getattr(Part, slot)


_DEFAULT = Part()
