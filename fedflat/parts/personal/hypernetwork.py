"""A hypernetwork on the server makes every client's weights: pFedHN (Shamsian et al., 2021), PLGU-GHN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.fields import BelowOne, Count, Natural, NonNegative, Positive
from fedflat.core.flat import FlatModel, Span, names_within
from fedflat.core.part import Backward, Part
from fedflat.core.tensors import State
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts.personal.generator import Generator, Shape, make_generator
from fedflat.parts.personal.layerwise import TwinTrajectories
from fedflat.parts.personal.split import head_tensors

LARGE = 1_000_000  # above this number of generated parameters, one output layer makes them piece by piece
CHUNK = 4096
known_generator = lru_cache(maxsize=2)(make_generator)  # can be shared: every use loads its own weights


@dataclass(frozen=True)
class Generated(Part):
    """What both hypernetwork methods have in common: the network, what it makes, and how it learns.

    The server keeps the network and a momentum; embeddings of absent clients do not change. The model of the mean
    embedding is evaluated on the common test set, and new clients receive it.

    Args:
        embedding: The length of v_i; None is 1 + N/4.
        hidden: The width of the hidden layers.
        depth: The number of hidden layers after the first.
        lr, momentum, decay, clip: Of the server's step; `decay` is the weight decay, `clip` the largest gradient norm.
        local_head: The head is not generated but stays with the client (-PC).
        embeddings: The number of v_i; None is one per client.
        chunk: The size of the pieces in which large models are made; None decides by the model's size, 0 is no pieces.
        sequential: One server step per client instead of one per round.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "client i receives θ_i = h(v_i; φ), trains it and sends Δ_i\n"
        "server: an SGD step of ψ = (φ, v) with the gradient −Σ_S p_i (∂h(v_i; φ)/∂ψ)ᵀ Δ_i, clipped"
    )
    common_model: ClassVar[bool] = False  # with local_head
    needs_mean: ClassVar[bool] = True
    embedding: Count | None = None
    hidden: Count = 100
    depth: Natural = 3
    lr: NonNegative = 0.01
    momentum: BelowOne = 0.9
    decay: NonNegative = 1e-3
    clip: Positive | None = 50.0
    local_head: bool = False
    embeddings: Count | None = None
    chunk: Natural | None = None
    sequential: bool = False

    def check(self, setup: SetupView) -> None:
        known = self.embeddings
        self.require(
            known is None or known >= setup.clients,
            f"{setup.clients} clients train, but there are embeddings={known}: give one per client",
        )

    def private(self, model: FlatModel) -> Iterable[str]:
        return head_tensors(model, self.name) if self.local_head else ()

    def _plan(self, server: Server) -> tuple[tuple[Span, ...], int, Shape]:
        """The spans to generate, the number of embeddings, and the shape of the hypernetwork."""
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
        """The network's weights and momentum, made from the seed before the first round."""
        state = server.state(self)
        if "phi" not in state:
            with streams.isolated(server.experiment.seed, "hypernetwork"):
                made = make_generator(*self._plan(server), server.theta.dtype).network.theta
            state.update(phi=made, velocity=torch.zeros_like(made))
        return state

    def generate(self, server: Server, client: int) -> Tensor:
        return self._generator(server).weights(self._phi(server)["phi"], client, server.theta)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        state, generator = self._phi(server), self._generator(server)
        network, phi, velocity = generator.network, state["phi"].clone(), state["velocity"].clone()
        network.grad.zero_()
        clients, total = list[int](), 0.0
        for update in updates:
            network.theta.copy_(phi)  # another client's weights may have been made in between
            generator.add_gradient(update.client, update.delta, 1.0 if self.sequential else update.weight)
            clients.append(update.client)
            total += update.weight
            if self.sequential:
                self._descend(phi, velocity, network.grad, generator.rows([update.client]))
                network.grad.zero_()
        if not self.sequential:
            self._descend(phi, velocity, network.grad.div_(total), generator.rows(clients))
        state["next_phi"], state["next_velocity"] = phi, velocity  # `step` makes them valid
        return generator.weights(phi, None, server.theta) - server.theta

    def _descend(self, phi: Tensor, velocity: Tensor, grad: Tensor, rows: Tensor) -> None:
        norm = grad.norm().item()
        if self.clip is not None and norm > self.clip - 1e-6:
            grad.mul_(self.clip / (norm + 1e-6))  # as for the clients' gradients
        grad.add_(phi, alpha=self.decay).mul_(rows)
        moved = velocity.mul(self.momentum).add_(grad)
        velocity.copy_(torch.where(rows.bool(), moved, velocity))
        phi.sub_(velocity * rows, alpha=self.lr)

    def step(self, server: Server, delta: Tensor) -> None:
        state = server.state(self)
        state["phi"], state["velocity"] = state.pop("next_phi"), state.pop("next_velocity")
        server.theta = server.theta + delta  # the model of the mean embedding

    def personal(self, state: State, theta: Tensor) -> State | None:
        return {"theta": theta}


@dataclass(frozen=True)
class PFedHN(Generated):
    """A hypernetwork makes every client's model and learns from how the clients change it (Shamsian et al., 2021).

    `Generated` explains the fields; local_head=True is pFedHN-PC, for which the authors take lr=0.05.
    The client keeps nothing (its head with local_head); sends 1 down, 1 up, or the body.
    Differs from the authors' code in one server step per round, with the mean of several clients (`sequential` takes
    one per client), and in not changing the embeddings of absent clients.
    """

    uniform: ClassVar[bool] = True


@dataclass(frozen=True)
class GHNTrajectories(TwinTrajectories):
    """The rule of the two trajectories, under the name of the part that uses it."""

    name: ClassVar[str] = "plgu_ghn"


@dataclass(frozen=True)
class PLGUGHN(Generated):
    """PLGU on a hypernetwork: the generalised trajectory trains the network, the plain one stays with the client.

    Both trajectories of PLGU's Algorithm 1 start at h(v_i; φ). The scores compare the client's last plain model
    with it. The change of the generalised one is sent. The rest is `Generated`, with two hidden layers after the first.
    The client keeps its plain model (1); sends 1 down, 1 up; two gradients per step.
    The supplement that defines the method was never published; this is a reading of its two sentences.

    Args:
        rho, score, score_dim_power, granularity: See `LayerWise`.
        evaluate: Which model of the client is evaluated: the "generated" one, or "local" for its plain one.
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
    score: Literal["sum", "mean", "none"] = "sum"
    score_dim_power: float = 1.0
    granularity: Literal["weight", "module", "tensor"] = "weight"
    evaluate: Literal["generated", "local"] = "generated"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._twin()  # checks its fields

    def _twin(self) -> GHNTrajectories:
        return GHNTrajectories(self.rho, self.score, self.score_dim_power, self.granularity)

    def begin(self, local: Local) -> None:
        twin, previous = self._twin(), local.state(self).get("theta", local.given)
        scores = twin.scores(twin.groups(local), previous, local.given)
        twin.start(local, local.given.clone(), local.model.buffers.clone(), scores)

    def gradient(self, local: Local, backward: Backward) -> None:
        self._twin().gradient(local, backward)

    def end(self, local: Local) -> None:
        scratch = local.scratch(self._twin())
        local.state(self).update(theta=scratch["own"], buffers=scratch["buffers"])

    def personal(self, state: State, theta: Tensor) -> State | None:
        return state if self.evaluate == "local" and state else {"theta": theta}
