"""Personalised federated learning in NumPy float64: one short function a method, written from the specification alone.

The world (data, order of the minibatches, gradients by hand) is that of the conformance tests. Rounds count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parts.conformance.harness import REGIMES, make_world
from parts.conformance.reference import Array, Mlp, World

NET = Mlp(3, 5, 2)
LAYERS = (slice(0, 20), slice(20, 32))
"""Weights and biases of the network's two linear layers."""
BODY = np.arange(NET.size) < 20
HEAD = ~BODY
EVERYTHING = np.ones(NET.size, dtype=bool)
ALL_THEN_SOME = ((0, 1, 2, 3), (0, 2), (3, 1, 2), (0, 3))
"""Everybody meets the first model, then some pause: what a client does alone can be told from what it does here."""
HARD = "Nesterov, weight decay, clip, unequal sizes, some take part"
PLAIN = "minibatches, unequal sizes, some take part, lr decays"


def world_of(regime: str, **changes: Any) -> World:
    return make_world(NET, **(REGIMES[regime] | changes))


def hard_world(**changes: Any) -> World:
    return world_of(HARD, **changes)


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


class Sgd:
    """Clip, weight decay and momentum of the world, starting afresh, on some coordinates only."""

    def __init__(self, world: World, t: int, only: Array = EVERYTHING) -> None:
        self.world, self.lr, self.only, self.v = world, world.lr_in(t), only, 0.0

    def step(self, w: Array, g: Array) -> Array:
        world, g = self.world, g * self.only
        if world.clip is not None:
            g = g * min(1.0, world.clip / (np.linalg.norm(g) + 1e-6))
        g = g + world.weight_decay * w * self.only
        self.v = world.momentum * self.v + g
        return w - self.lr * (g + world.momentum * self.v if world.nesterov else self.v)


def train(world: World, t: int, i: int, w: Array, only: Array = EVERYTHING, epochs: int | None = None) -> Array:
    """Local SGD on some coordinates."""
    sgd = Sgd(world, t, only)
    for x, y in world.minibatches(t, i) if epochs is None else passes(world, t, i, epochs):
        w = sgd.step(w, world.net.gradient(w, x, y))
    return w


def passes(world: World, t: int, i: int, epochs: int) -> Any:
    return world.but(steps=None, epochs=epochs).minibatches(t, i)


@dataclass
class Outcome:
    """w: the server's weights at the end. own: the model of every client that took part."""

    w: Array
    own: dict[int, Array]
    extra: dict[str, Any] = field(default_factory=dict)


TrainClient = Callable[[int, int, Array], Array]


def federate(
    world: World, train_client: TrainClient, *, shared: Array = EVERYTHING, uniform: bool = False, beta: float = 1
) -> Array:
    """Rounds of `train_client(t, i, w)`, which returns what client i makes of w; what is shared is averaged."""
    w = world.start
    for t, chosen in enumerate(world.participants):
        ends = {i: train_client(t, i, w) for i in chosen}
        w = w + beta * world.server_lr * shared * (world.mean(chosen, ends, uniform) - w)
    return w


def ditto(world: World, lam: float) -> Outcome:
    own: dict[int, Array] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        v, sgd = own.get(i, w), Sgd(world, t)
        for x, y in world.minibatches(t, i):
            v = sgd.step(v, world.net.gradient(v, x, y) + lam * (v - w))
        own[i] = v
        return train(world, t, i, w)

    return Outcome(federate(world, train_client), own)


def pfedme(world: World, lam: float, steps: int, lr: float, beta: float = 1.0, mu: float = 0.0) -> Outcome:
    own: dict[int, Array] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        theta, local = w, w
        for x, y in world.minibatches(t, i):
            for _ in range(steps):
                theta = theta - lr * (world.net.gradient(theta, x, y) + lam * (theta - local) + mu * theta)
            local = local - world.lr_in(t) * lam * (local - theta)
        own[i] = theta
        return local

    return Outcome(federate(world, train_client, beta=beta), own)


def split(world: World, private: Array, phases: Sequence[tuple[Array, int | None]] = ((EVERYTHING, None),)) -> Outcome:
    """Private coordinates stay; each phase trains some coordinates for some epochs (the experiment's if None)."""
    kept: dict[int, Array] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        w = np.where(private, kept.get(i, w), w)
        for only, epochs in phases:
            w = train(world, t, i, w, only, epochs)
        kept[i] = w
        return w

    end = federate(world, train_client, shared=~private)
    return Outcome(end, {i: np.where(private, w, end) for i, w in kept.items()})


def apfl(world: World, alpha: float, learn: bool) -> Outcome:
    own: dict[int, Array] = {}
    alphas: dict[int, float] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        v, a = own.get(i, w), alphas.get(i, alpha)
        common, personal = Sgd(world, t), Sgd(world, t)
        for k, (x, y) in enumerate(world.minibatches(t, i)):
            g = world.net.gradient(a * v + (1 - a) * w, x, y)
            slope = g @ (v - w)
            v, w = personal.step(v, a * g), common.step(w, world.net.gradient(w, x, y))
            if learn and k == 0:
                a = min(1.0, max(0.0, a - world.lr_in(t) * slope))
        own[i], alphas[i] = v, a
        return w

    end = federate(world, train_client)
    return Outcome(end, {i: alphas[i] * v + (1 - alphas[i]) * end for i, v in own.items()}, {"v": own, "alpha": alphas})


# ---- layer-wise perturbations ----


def scores(theta: Array, w: Array, layers: Sequence[slice], norm: str = "sum", kappa: float = 1.0) -> Array:
    raw = np.array([np.linalg.norm(theta[s] - w[s]) / (s.stop - s.start) ** kappa for s in layers])
    if norm == "none":
        return raw
    shares = raw / raw.sum() if raw.sum() > 0 else np.full(len(layers), 1 / len(layers))
    return shares * (len(layers) if norm == "mean" else 1)


def perturbation(g: Array, xi: Array, layers: Sequence[slice], rho: float, p: float = 2.0) -> Array:
    q, out = p / (p - 1), np.zeros_like(g)
    for score, s in zip(xi, layers, strict=True):
        out[s] = rho * score * np.sign(g[s]) * np.abs(g[s]) ** (q - 1)
    return out / ((np.abs(g) ** q).sum() ** (1 / p) + 1e-12)


@dataclass(frozen=True)
class Ascent:
    """How far, and how the layers are weighed."""

    rho: float = 0.2
    norm: str = "sum"
    kappa: float = 1.0
    p: float = 2.0
    layers: Sequence[slice] = LAYERS

    def scores(self, theta: Array, w: Array) -> Array:
        return scores(theta, w, self.layers, self.norm, self.kappa)

    def at(self, g: Array, xi: Array) -> Array:
        return perturbation(g, xi, self.layers, self.rho, self.p)


def lwsam(world: World, ascent: Ascent) -> Outcome:
    previous: dict[int, Array] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        xi, sgd = ascent.scores(previous.get(i, w), w), Sgd(world, t)
        for x, y in world.minibatches(t, i):
            w = sgd.step(w, world.net.gradient(w + ascent.at(world.net.gradient(w, x, y), xi), x, y))
        previous[i] = w
        return w

    return Outcome(federate(world, train_client), previous)


def twin(
    world: World,
    t: int,
    i: int,
    theta: Array,
    w: Array,
    xi: Array,
    ascent: Ascent,
    by: str = "theta",
    train_theta: Array = EVERYTHING,
) -> tuple[Array, Array]:
    """Algorithm 1: θ descends plainly, w along gradients at w + ε, on the same minibatches."""
    plain, generalised = Sgd(world, t), Sgd(world, t)
    for x, y in world.minibatches(t, i):
        g = world.net.gradient(theta, x, y)
        epsilon = ascent.at(g if by == "theta" else world.net.gradient(w, x, y), xi)
        theta = plain.step(theta, g * train_theta)
        w = generalised.step(w, world.net.gradient(w + epsilon, x, y))
    return theta, w


def plgu_lf(world: World, ascent: Ascent, layers: int, by: str = "theta") -> Outcome:
    own: dict[int, Array] = {}

    def train_client(t: int, i: int, w: Array) -> Array:
        xi = ascent.scores(own.get(i, w), w)
        theta = w.copy()
        for number in sorted(range(len(xi)), key=lambda n: (-xi[n], n))[:layers]:
            theta[ascent.layers[number]] = own.get(i, w)[ascent.layers[number]]
        own[i], w = twin(world, t, i, theta, w, xi, ascent, by)
        return w

    return Outcome(federate(world, train_client, uniform=True), own)


def plgu_grep(
    world: World,
    ascent: Ascent,
    body_epochs: int = 1,
    body_steps: int | None = None,
    reuse: bool = False,
    source: str = "step",
) -> Outcome:
    """`ascent.layers` are those of the body."""
    kept: dict[int, Array] = {}
    body_world = world.but(steps=body_steps, epochs=body_epochs)

    def train_client(t: int, i: int, received: Array) -> Array:
        w = train(world, t, i, np.where(HEAD, kept.get(i, received), received), HEAD)
        against = kept.get(i, received) if source == "previous" else received
        sgd = Sgd(world, t, BODY)
        for x, y in body_world.minibatches(t, i):
            first = world.net.gradient(w, x, y) * BODY
            w = sgd.step(w, first)
            second = first if reuse else world.net.gradient(w, x, y) * BODY
            epsilon = ascent.at(second, ascent.scores(w, against))
            w = sgd.step(w, world.net.gradient(w + epsilon, x, y))
        kept[i] = w
        return w

    end = federate(world, train_client, shared=BODY, uniform=True)
    return Outcome(end, {i: np.where(HEAD, w, end) for i, w in kept.items()})


# ---- hypernetworks ----


class Hyper(nn.Module):
    """Embedding, trunk, one output layer a tensor; or with chunks a common output layer on [v_i; chunk]."""

    def __init__(
        self, clients: int, sizes: Sequence[int], embedding: int, hidden: int, depth: int, chunk: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(clients, embedding)
        if chunk:
            self.pieces = nn.Embedding(-(-sum(sizes) // chunk), embedding)
        self.trunk = nn.Sequential(nn.Linear(embedding * (2 if chunk else 1), hidden))
        for _ in range(depth):
            self.trunk.extend([nn.ReLU(), nn.Linear(hidden, hidden)])
        self.outputs = nn.ModuleList(nn.Linear(hidden, size) for size in ([chunk] if chunk else sizes))
        self.total, self.chunk = sum(sizes), chunk
        self.double()

    def forward(self, client: int) -> Tensor:
        v = self.embedding.weight[client]
        if not self.chunk:
            return torch.cat([output(self.trunk(v)) for output in self.outputs])
        made = [self.outputs[0](self.trunk(torch.cat([v, piece]))) for piece in self.pieces.weight]
        return torch.cat(made)[: self.total]


def hypernetwork(
    world: World,
    network: Hyper,
    train_client: TrainClient,
    *,
    lr: float,
    momentum: float,
    decay: float,
    clip: float,
    made: Array = EVERYTHING,
) -> Outcome:
    """Server: SGD on ½ mean ‖h(v_i) − θ̃_i‖² by autograd, clipped; rows of absent clients stay. Alters `network`."""
    velocity = [torch.zeros_like(p) for p in network.parameters()]
    kept: dict[int, Array] = {}
    for t, chosen in enumerate(world.participants):
        loss = torch.zeros((), dtype=torch.float64)
        for i in chosen:
            output, start = network(i), kept.get(i, world.start).copy()
            start[made] = output.detach().numpy()
            kept[i] = train_client(t, i, start)
            loss = loss + 0.5 * (output - torch.from_numpy(kept[i][made])).square().sum() / len(chosen)
        network.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), clip)
        with torch.no_grad():
            for v, p in zip(velocity, network.parameters(), strict=True):
                rows = torch.ones_like(p)
                if p is network.embedding.weight:
                    rows.zero_()[list(chosen)] = 1
                v.copy_(torch.where(rows.bool(), momentum * v + p.grad + decay * p, v))
                p.sub_(lr * v * rows)
    own = {}
    for i in range(world.clients):
        own[i] = kept.get(i, world.start).copy()
        own[i][made] = network(i).detach().numpy()
    return Outcome(world.start, own, {"phi": flat(network), "kept": kept})
