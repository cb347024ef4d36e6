"""A network on the server that makes every client's weights: pFedHN (Shamsian et al., 2021), PLGU-GHN (paper 002)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat import streams
from fedflat.flat import FlatModel, Span, names_within
from fedflat.method import Evaluate, Local, Part, Server, State, Update
from fedflat.parts.personal.generator import Generator, Shape, make_generator
from fedflat.parts.personal.layerwise import TwinTrajectories
from fedflat.parts.personal.split import head_tensors

if TYPE_CHECKING:
    from fedflat.task import Task

LARGE = 1_000_000  # generated parameters above which one output layer makes them piece by piece
CHUNK = 4096
known_generator = lru_cache(maxsize=2)(make_generator)  # its weights are nobody's: every use loads its own


@dataclass(frozen=True)
class Generated(Part):
    """What both hypernetwork methods have in common: the network, what it makes, and how it learns.

    embedding: length of v_i, 1 + N/4 when None. hidden: width. depth: hidden layers after the first.
    lr, momentum, decay, clip: of the server's step. local_head: the head is not made but stays with the client (-PC).
    embeddings: how many v_i there are, one a client when None. chunk: size of the pieces in which large models are
    made; None decides by size, 0 never. sequential: one server step a client instead of one a round.
    Server keeps the network and a momentum; embeddings of absent clients stay. What is evaluated on the common test set
    is the model of the mean embedding, and so is what a new client gets.
    """

    formula: ClassVar[str] = (
        "client i receives θ_i = h(v_i; φ), trains it and sends Δ_i\n"
        "server: an SGD step of ψ = (φ, v) with the gradient −Σ_S p_i (∂h(v_i; φ)/∂ψ)ᵀ Δ_i, clipped"
    )
    splits: ClassVar[bool] = True  # with local_head
    embedding: int | None = None
    hidden: int = 100
    depth: int = 3
    lr: float = 0.01
    momentum: float = 0.9
    decay: float = 1e-3
    clip: float | None = 50.0
    local_head: bool = False
    embeddings: int | None = None
    chunk: int | None = None
    sequential: bool = False

    def __post_init__(self) -> None:
        self.require(self.embedding is None or self.embedding >= 1, "embedding must be 1 or more")
        self.require(self.hidden >= 1, f"hidden must be 1 or more, got {self.hidden}")
        self.require(self.depth >= 0, f"depth must not be negative, got {self.depth}")
        self.require(self.lr >= 0, f"lr must not be negative, got {self.lr}")
        self.require(0 <= self.momentum < 1, f"momentum must lie in [0, 1), got {self.momentum}")
        self.require(self.decay >= 0, f"decay must not be negative, got {self.decay}")
        self.require(self.clip is None or self.clip > 0, f"clip must be above 0, got {self.clip}")
        self.require(self.chunk is None or self.chunk >= 0, f"chunk must not be negative, got {self.chunk}")
        self.require(
            self.embeddings is None or self.embeddings >= 1, f"embeddings must be 1 or more: {self.embeddings}"
        )

    def check(self, task: Task) -> None:
        """Refuse a federation with more clients than there are embeddings."""
        known = self.embeddings
        self.require(
            known is None or known >= task.clients,
            f"{task.clients} clients train, but there are embeddings={known}: give one a client",
        )

    def private(self, model: FlatModel) -> Iterable[str]:
        """The head, if it is not made."""
        return head_tensors(model, self.name) if self.local_head else ()

    def _plan(self, server: Server) -> tuple[tuple[Span, ...], int, Shape]:
        """What is made, how many embeddings there are, and the network's measures."""
        head = names_within(server.model.spans, server.model.require_head(self.name)) if self.local_head else []
        spans = tuple(span for span in server.model.spans if span.name not in head)
        large = sum(span.stop - span.start for span in spans) > LARGE
        chunk = (CHUNK if large else 0) if self.chunk is None else self.chunk
        shape = (self.embedding or 1 + server.clients // 4, self.hidden, self.depth, chunk)
        return spans, self.embeddings or server.clients, shape

    def _generator(self, server: Server) -> Generator:
        with streams.isolated(server.experiment.seed, "hypernetwork"):
            return known_generator(*self._plan(server), server.theta.dtype)

    def _phi(self, server: Server) -> State:
        """The network's weights and momentum; made by the seed before the first round."""
        state = server.state(self)
        if "phi" not in state:
            with streams.isolated(server.experiment.seed, "hypernetwork"):
                made = make_generator(*self._plan(server), server.theta.dtype).network.theta
            state.update(phi=made, velocity=torch.zeros_like(made))
        return state

    def generate(self, server: Server, client: int) -> Tensor:
        """θ_i = h(v_i; φ)."""
        return self._generator(server).weights(self._phi(server)["phi"], client, server.theta)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Learn from the clients' changes; the result waits in the state until `step` makes it valid."""
        state, generator = self._phi(server), self._generator(server)
        network, phi, velocity = generator.network, state["phi"].clone(), state["velocity"].clone()
        network.grad.zero_()
        heard, total = list[int](), 0.0
        for update in updates:
            network.theta.copy_(phi)  # weights for a client to come may have been made in between
            generator.add_gradient(update.client, update.delta, 1.0 if self.sequential else update.weight)
            heard.append(update.client)
            total += update.weight
            if self.sequential:
                self._descend(phi, velocity, network.grad, generator.rows([update.client]))
                network.grad.zero_()
        if not self.sequential:
            self._descend(phi, velocity, network.grad.div_(total), generator.rows(heard))
        state["next_phi"], state["next_velocity"] = phi, velocity
        return generator.weights(phi, None, server.theta) - server.theta

    def _descend(self, phi: Tensor, velocity: Tensor, grad: Tensor, rows: Tensor) -> None:
        norm = grad.norm().item()
        if self.clip is not None and norm > self.clip:
            grad.mul_(self.clip / norm)
        grad.add_(phi, alpha=self.decay).mul_(rows)
        moved = velocity.mul(self.momentum).add_(grad)
        velocity.copy_(torch.where(rows.bool(), moved, velocity))
        phi.sub_(velocity * rows, alpha=self.lr)

    def step(self, server: Server, delta: Tensor) -> None:
        """Adopt what was learnt; the server's own model is that of the mean embedding."""
        state = server.state(self)
        state["phi"], state["velocity"] = state.pop("next_phi"), state.pop("next_velocity")
        server.theta = server.theta + delta

    def personal(self, state: State, theta: Tensor) -> State | None:
        """What the client receives is its own."""
        return {"theta": theta}


@dataclass(frozen=True)
class PFedHN(Generated):
    """A hypernetwork makes every client's model and learns from how the clients change it (Shamsian et al., 2021).

    Fields are explained in `Generated`; local_head=True is pFedHN-PC, for which the authors take lr=0.05.
    Client keeps nothing (its head with local_head); sends 1 down, 1 up, or the body.
    Differs from the authors' code in one server step a round, with the mean of several clients (`sequential` takes one
    a client), and in leaving the embeddings of absent clients alone.
    """

    uniform: ClassVar[bool] = True


@dataclass(frozen=True)
class GHNTrajectories(TwinTrajectories):
    """The rule of the two trajectories under the name of the part that has them."""

    name: ClassVar[str] = "plgu_ghn"


@dataclass(frozen=True)
class PLGUGHN(Generated):
    """PLGU on a hypernetwork: the generalised trajectory trains the network, the plain one stays with the client.

    Both trajectories of paper 002's Algorithm 1 start at h(v_i; φ); scores between the client's last plain model and
    that; the change of the generalised one is sent. The rest is `Generated`, with two hidden layers after the first.

    rho, score, score_dim_power, granularity: see `LayerWise`. evaluate: "generated", or "local" for the client's plain
    model. Client keeps its plain model (1); sends 1 down, 1 up; two gradients a step.
    The supplement that defines the method was never published; this is a reading of its two sentences.
    """

    name: ClassVar[str] = "plgu_ghn"
    formula: ClassVar[str] = (
        "θ = w = h(v_i; φ);  each step: g = ∇F_B(θ),  θ ← θ − η_l g,  w ← w − η_l ∇F_B(w + ε)\n"
        "ε_l = ρ ξ_l g_l / ‖g‖,  ξ_l ∝ ‖θ_i,l − w_l‖ / d_l^κ with θ_i the client's last θ\n"
        "server: an SGD step of ψ = (φ, v) with the gradient −Σ_S p_i (∂h(v_i; φ)/∂ψ)ᵀ Δ_i, clipped"
    )
    uniform: ClassVar[bool] = True
    depth: int = 2
    rho: float = 0.05
    score: str = "sum"
    score_dim_power: float = 1.0
    granularity: str = "weight"
    evaluate: str = "generated"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("generated", "local")
        self.require(self.evaluate in known, f"evaluate is 'generated' or 'local', not {self.evaluate!r}")
        self._twin()

    def _twin(self) -> GHNTrajectories:
        return GHNTrajectories(self.rho, self.score, self.score_dim_power, self.granularity)

    def begin(self, local: Local) -> None:
        """Scores; both trajectories start at what was received."""
        twin, previous = self._twin(), local.state(self).get("theta", local.origin)
        scores = twin.scores(twin.groups(local), previous, local.origin)
        twin.start(local, local.origin.clone(), local.model.buffers.clone(), scores)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """One step of the plain trajectory; the gradient of the generalised one."""
        self._twin().gradient(local, evaluate)

    def end(self, local: Local) -> None:
        """Keep the plain model."""
        scratch = local.scratch(self._twin())
        local.state(self).update(theta=scratch["own"], buffers=scratch["buffers"])

    def personal(self, state: State, theta: Tensor) -> State | None:
        """The model that was made, or the client's plain one."""
        return state if self.evaluate == "local" and state else {"theta": theta}
