"""`Part`: one component of a method, and the slots of the two loops that it may fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from fedflat.core.fields import check_fields
from fedflat.core.flat import FlatModel
from fedflat.core.samples import Samples
from fedflat.core.sums import TreeSum
from fedflat.core.tensors import State
from fedflat.core.views import Batch, Local, Server, SetupView, Update
from fedflat.errors import InputError

Backward = Callable[..., Tensor]
Fit = Callable[..., None]


@dataclass(frozen=True)
class Part:
    """One component of a method: a frozen dataclass of hyper-parameters that fills some of the slots below.

    A part stores nothing itself: what must last is kept in `local.state(self)` and `server.state(self)`.
    The order in which parts are written never matters; `rank` orders them where operations do not commute.
    `gradient`, `train`, `adapt`, `outgoing`, `generate`, `combine` and `step` have one owner per method; several parts
    may fill any other slot. Fields declare their ranges: `rho: NonNegative = 0.05`; see `core.fields`.
    """

    name: ClassVar[str] = ""
    rank: ClassVar[int] = 0
    uniform: ClassVar[bool] = False
    """Whether `weighting="auto"` means unweighted means over clients, which the method's formulas need."""
    everywhere: ClassVar[bool] = False
    """Whether `correct_gradient` and `constrain_weights` also act on branches other than "global"."""
    global_gradient: ClassVar[bool] = False
    """Whether `gradient` is about the branch "global" alone; other branches then follow the plain gradient."""
    needs_mean: ClassVar[bool] = False
    """Whether the server step is only correct for clients' own updates or their plain mean.

    So no other part may fill `combine`, nor may one that `replaces_mean`.
    """
    replaces_mean: ClassVar[bool] = False
    """Whether `regroup` puts something else in place of honest updates, so that their mean becomes another one."""
    claims: ClassVar[tuple[str, ...]] = ()
    """What the part claims besides its slots, in words: two parts with the same claim cannot be combined."""
    alone_in: ClassVar[Mapping[str, str]] = {}
    """Slots that no other part of the method may fill, each with the reason."""
    simulation_only: ClassVar[bool] = False
    """Whether what this part sends only serves the simulation and does not count as communication."""
    stacks: ClassVar[bool] = False
    """Whether its slots on the client act on the last dimension, so that clients can be trained as rows of a stack."""
    sample_means: ClassVar[bool] = False
    """Whether its terms of the loss are means over samples, so that a minibatch can be cut (`microbatch`)."""
    common_model: ClassVar[bool] = True
    """Whether the server has a model for everybody. If not, because of what is `private` or at all, none is scored."""
    judged_by: ClassVar[str] = "common"
    """Whose models the method is made for, and by which it is ranked: the "common" one, or those of the "clients"."""
    adapts: ClassVar[bool] = False
    """Whether a client's personal model is the common one, adapted to the client at evaluation."""
    formula: ClassVar[str] = ""
    """The method in the paper's symbols, as plain text; reports and `fedflat list methods` show it."""
    ignores_server_lr: ClassVar[str] = ""
    """A description of the part's own server step if that does not use `server_lr`; for the error if it is set."""
    model_options: ClassVar[Mapping[str, Any]] = {}
    """Options of a network that the part's paper uses, if the network has them (`fedflat cost`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        check_fields(self, self.name)

    def __str__(self) -> str:
        inner = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{self.name}({inner})" if inner else self.name

    @property
    def hides_participation(self) -> bool:
        """Whether the server's draws are secret, and the model must not show that a round had no updates."""
        return False

    @property
    def robust(self) -> str:
        """What `combine` protects from malicious clients: the "update", "messages" that come with it as well, or ""."""
        return ""

    @property
    def trusted_samples(self) -> int:
        """Samples on which the server trains in every round, for `server.trusted`; 0 if the part needs none."""
        return 0

    @property
    def fewest_clients(self) -> int:
        """With how many clients the part works at least, as its hyper-parameters are."""
        return 1

    def require(self, condition: bool, message: str) -> None:
        """Raise an `InputError` that names this part unless `condition` holds."""
        if not condition:
            raise InputError(f"{self.name}: {message}")

    def cost_variants(self) -> Sequence[tuple[float, Part]]:
        """Parts without random passes, with weights: the weighted sum of their costs is this part's expected cost."""
        return [(1.0, self)]

    def idle_rounds(self, rounds: int) -> int:
        """In how many rounds, the first ones of `rounds`, a method has the same bits with this part and without it."""
        return 0

    # ---- once ----
    def build(self, module: nn.Module) -> nn.Module:
        """Change the network that is trained, saved and exported; the names of its tensors must stay the same."""
        return module

    def private(self, model: FlatModel) -> Iterable[str]:
        """Names of parameters and buffers that each client keeps: they are never sent or averaged."""
        return ()

    def check(self, setup: SetupView) -> None:
        """Refuse, or warn about, an experiment, a model or data that this part cannot work with."""

    # ---- client ----
    def begin(self, local: Local) -> None:
        """Start of the client's round: `theta` holds the received weights and may be changed; so may `origin`."""

    def train(self, local: Local, fit: Fit) -> None:
        """Run the local loop, `fit(epochs=…, steps=…, only=mask, branch=…)`, as often as needed. One owner."""
        fit()

    def step_rate(self, local: Local, step: int, steps: int) -> float:
        """The factor of the learning rate in local step `step` (from 0) of `steps`; factors of parts are multiplied."""
        return 1.0

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Change the minibatch."""
        return batch

    def around_forward(self, local: Local) -> AbstractContextManager[Any]:
        """A context manager around every forward pass of the local loop."""
        return nullcontext()

    def loss(self, local: Local, output: Any) -> Tensor | None:
        """A term to add to the batch's loss."""
        return None

    def further_losses(self, local: Local, output: Any) -> Iterator[Tensor]:
        """Terms that each need a forward pass: each is differentiated, and its memory freed, before the next one."""
        yield from ()

    def gradient(self, local: Local, backward: Backward) -> None:
        """Put the gradient for the step into `local.grad`. One owner.

        `backward()` fills it with the gradient of the loss at the current weights, `backward(of=function)` with that of
        a function of the model's output. Both return the value.
        """
        backward()

    def correct_gradient(self, local: Local) -> None:
        """Change `local.grad` in place, at the unperturbed weights, before clipping."""

    def constrain_weights(self, local: Local) -> None:
        """Change `local.theta` in place after the optimiser's step."""

    def end(self, local: Local) -> None:
        """End of the client's round: update the client's state, send tensors to the server."""

    def client_metrics(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        """Named numbers to record for this client. `theta` holds the weights that are sent; change nothing."""
        return {}

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        """Change the update before it is sent, after `end`. Its `private` coordinates are zero and stay so."""
        return delta

    def adapt(self, local: Local, fit: Fit) -> None:
        """Fit the model to a client before evaluation: always for new clients, for all if `adapts`. One owner."""
        fit(branch="adapt")

    # ---- server ----
    def schedule(self, lr: float, server: Server) -> float:
        """The clients' learning rate of `server.round`, given the one so far."""
        return lr

    def outgoing(self, server: Server) -> Tensor:
        """The weights to send to every participant instead of the server's own. One owner."""
        return server.theta

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        """Named tensors to send to every participant with the weights."""
        return {}

    def generate(self, server: Server, client: int) -> Tensor:
        """The weights to send to a client instead of the server's own. One owner."""
        return server.theta

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        """Say what is wrong with the numbers that a client sent with its update, which may be a stranger's."""
        return None

    def regroup(self, server: Server, updates: Iterable[Update]) -> Iterable[Update]:
        """Replace the updates by others before they are combined, for example by means of neighbours."""
        return updates

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Combine updates, which arrive one by one in a fixed order. One owner; by default the weighted mean."""
        total, weight = TreeSum[Tensor](), 0.0
        for update in updates:
            total.add(update.delta * update.weight)
            weight += update.weight
        return total.result().div_(weight)

    def step(self, server: Server, delta: Tensor) -> None:
        """Move `server.theta` by the combined update. One owner."""
        server.theta = server.theta.add(delta, alpha=server.server_lr)

    def end_round(self, server: Server) -> None:
        """End of the round, after the step."""

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Named numbers to record for this round, given one row per client that returned an update; change nothing."""
        return {}

    # ---- evaluation ----
    def test_metrics(self, setup: SetupView, test: Samples) -> Mapping[str, float]:
        """Named numbers to record, measured on the common test set; `setup.model` holds the evaluated weights."""
        return {}

    def evaluation_weights(self, server: Server) -> Tensor | None:
        """Weights to evaluate instead of `server.theta`; None if there are none yet."""
        return None

    def personal(self, state: State, theta: Tensor) -> State | None:
        """A client's personal model, given what this part keeps for it and the weights the client would receive.

        Returns:
            The weights as "theta" and, if the model has its own, the statistics as "buffers"; None without a model.
            With "second" and "share" outputs are mixed: share · the output + (1 − share) · that at "second".
        """
        return None


SINGLE_OWNER = {
    "train": "the passes of local training",
    "gradient": "the rule that makes the gradient",
    "adapt": "the adaptation before evaluation",
    "outgoing": "the weights that a client receives",
    "generate": "the weights that a client receives",
    "combine": "the combination of updates",
    "personal": "the personal model of a client",
    "step": "the server step",
}
_HELPERS = ("require", "cost_variants", "idle_rounds")
SLOTS = tuple(
    name for name, value in vars(Part).items() if callable(value) and not name.startswith("_") and name not in _HELPERS
)
"""The names of all slots, in the order in which the loops call them."""


ON_CLIENT = tuple(SLOTS[SLOTS.index("begin") : SLOTS.index("adapt")])
"""The slots that are called while a client trains."""


def can_stack(part: Part) -> bool:
    """Whether clients can be stacked with `part`; a part that does nothing while clients train never hinders."""
    return part.stacks or not any(fills(part, slot) for slot in ON_CLIENT)


def fills(part: Part, slot: str) -> bool:
    """Whether `part` overrides `slot`."""
    return getattr(type(part), slot) is not getattr(Part, slot)
