"""An independent federated simulator in NumPy float64: one short function a method, written from the formulas alone.

It shares nothing with the library but the order of the minibatches, which `World.order` hands in. Rounds count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray
Gradient = Callable[[Array], Array]
Rule = Callable[[Gradient, Array], Array]
"""From the batch's gradient (a function of the weights) and the weights to the gradient that is followed."""
Term = Callable[[Array, Array], Array]
"""From the features of a batch and its inputs to the gradient, with respect to the features, of an added loss."""


# ---- networks, with their gradients by hand; the loss is ½ · mean over the batch of ‖output − target‖² ----


@dataclass(frozen=True)
class Linear:
    """output = W x + b; a quadratic problem. Weights first, then biases."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.outputs * (self.inputs + 1)

    @property
    def is_weight(self) -> Array:
        return np.arange(self.size) < self.outputs * self.inputs

    @property
    def channels(self) -> list[slice]:
        return [slice(o * self.inputs, (o + 1) * self.inputs) for o in range(self.outputs)]

    def split(self, w: Array) -> tuple[Array, Array]:
        edge = self.outputs * self.inputs
        return w[:edge].reshape(self.outputs, self.inputs), w[edge:]

    def output(self, w: Array, x: Array) -> Array:
        weight, bias = self.split(w)
        return x @ weight.T + bias

    def gradient(self, w: Array, x: Array, y: Array, term: Term | None = None) -> Array:
        residual = (self.output(w, x) - y) / len(x)
        return np.concatenate([(residual.T @ x).ravel(), residual.sum(0)])

    def quadratic(self, x: Array, y: Array) -> tuple[Array, Array]:
        """A and b of the loss ½ wᵀA w − bᵀw + const."""
        b = -self.gradient(np.zeros(self.size), x, y)
        return np.stack([self.gradient(e, x, y) + b for e in np.eye(self.size)], axis=1), b


@dataclass(frozen=True)
class Mlp:
    """output = W₂ relu(W₁ x + b₁) + b₂; the features are the hidden activations."""

    inputs: int
    hidden: int
    outputs: int

    @property
    def layers(self) -> tuple[Linear, Linear]:
        return Linear(self.inputs, self.hidden), Linear(self.hidden, self.outputs)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def is_weight(self) -> Array:
        return np.concatenate([layer.is_weight for layer in self.layers])

    @property
    def channels(self) -> list[slice]:
        first, second = self.layers
        return [
            *first.channels,
            *(slice(c.start + first.size, c.stop + first.size) for c in second.channels),
        ]

    def split(self, w: Array) -> tuple[Array, Array]:
        return w[: self.layers[0].size], w[self.layers[0].size :]

    def features(self, w: Array, x: Array) -> Array:
        return np.maximum(self.layers[0].output(self.split(w)[0], x), 0.0)

    def output(self, w: Array, x: Array) -> Array:
        return self.layers[1].output(self.split(w)[1], self.features(w, x))

    def gradient(self, w: Array, x: Array, y: Array, term: Term | None = None) -> Array:
        last, z = self.split(w)[1], self.features(w, x)
        residual = (self.layers[1].output(last, z) - y) / len(x)
        back = residual @ self.layers[1].split(last)[0]
        if term is not None:
            back = back + term(z, x)
        back = back * (z > 0)
        return np.concatenate(
            [
                (back.T @ x).ravel(),
                back.sum(0),
                (residual.T @ z).ravel(),
                residual.sum(0),
            ]
        )


# ---- rules for the gradient, terms of the loss, constraints on the weights ----


def plain(f: Gradient, w: Array) -> Array:
    return f(w)


def sam(rho: float) -> Rule:
    def rule(f: Gradient, w: Array) -> Array:
        g = f(w)
        return f(w + rho * g / (np.linalg.norm(g) + 1e-16))

    return rule


def asam(rho: float, eta: float, is_weight: Array) -> Rule:
    def rule(f: Gradient, w: Array) -> Array:
        g, t = f(w), np.where(is_weight, np.abs(w) + eta, 1.0)
        return f(w + rho * t**2 * g / (np.linalg.norm(t * g) + 1e-16))

    return rule


def lookahead(rho: float, mix: float, normalised: bool = True) -> Rule:
    """FedSpeed's mixture of the gradient here and the gradient a step uphill."""

    def rule(f: Gradient, w: Array) -> Array:
        g = f(w)
        return (1 - mix) * g + mix * f(w + rho * g / (np.linalg.norm(g) + 1e-16 if normalised else 1))

    return rule


def man_term(zeta: float) -> Term:
    return lambda z, x: zeta * 2 * z / z.size


def contrast_term(mu: float, temperature: float, features: Gradient, previous: Gradient) -> Term:
    """Gradient of μ · mean of −log(e^{s_g/T} / (e^{s_g/T} + e^{s_p/T})), s the cosine with frozen features."""

    def cosine(z: Array, other: Array) -> tuple[Array, Array]:
        nz, no = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(other, axis=1, keepdims=True)
        s = (z * other).sum(1, keepdims=True) / (nz * no)
        return s, other / (nz * no) - s * z / nz**2

    def term(z: Array, x: Array) -> Array:
        (s_g, d_g), (s_p, d_p) = cosine(z, features(x)), cosine(z, previous(x))
        share = 1 / (1 + np.exp((s_g - s_p) / temperature))  # softmax weight of the previous model
        return mu / temperature * share * (d_p - d_g) / len(x)

    return term


Constraint = Callable[[Array, Array], Array]


def free(w: Array, origin: Array) -> Array:
    return w


def projected(channels: Sequence[slice], center: bool = True, orthogonal: bool = True) -> Constraint:
    """origin + the displacement made orthogonal, channel by channel, to the ones and to the origin."""

    def constrain(w: Array, origin: Array) -> Array:
        out = w.copy()
        for c in channels:
            directions = ([np.ones(c.stop - c.start)] if center else []) + ([origin[c]] if orthogonal else [])
            if directions and c.stop - c.start >= 3:
                basis = np.stack(directions, axis=1)
                v = w[c] - origin[c]
                out[c] = origin[c] + v - basis @ np.linalg.lstsq(basis, v, rcond=None)[0]
        return out

    return constrain


def sphere(channels: Sequence[slice]) -> Constraint:
    def constrain(w: Array, origin: Array) -> Array:
        out = w.copy()
        for c in channels:
            if c.stop - c.start >= 3:
                centred = w[c] - w[c].mean()
                out[c] = np.sqrt(2) * centred / np.linalg.norm(centred)
        return out

    return constrain


# ---- the world: data, schedule of participants, local SGD ----


@dataclass(frozen=True)
class World:
    """Everything that is not the method. `order(t, i)` yields one permutation of client i's samples an epoch."""

    net: Any
    data: Sequence[tuple[Array, Array]]
    start: Array
    participants: Sequence[Sequence[int]]
    order: Callable[[int, int], Iterator[Array]]
    steps: int | None = None
    epochs: int = 1
    batch: int = 0
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    server_lr: float = 1.0
    seed: int = 0
    rule: Rule = plain
    constraint: Constraint = free
    term: Term | None = None
    schedule: Callable[[int], float] | None = None

    def but(self, **changes: Any) -> World:
        return replace(self, **changes)

    @property
    def clients(self) -> int:
        return len(self.data)

    @property
    def sizes(self) -> Array:
        return np.array([len(y) for _, y in self.data])

    @property
    def share(self) -> Array:
        """ω_i"""
        return self.sizes / self.sizes.mean()

    def lr_in(self, t: int) -> float:
        return self.schedule(t) if self.schedule else self.lr * self.lr_decay**t

    def minibatches(self, t: int, i: int) -> Iterator[tuple[Array, Array]]:
        x, y = self.data[i]
        size = self.batch or len(y)
        left = self.epochs * -(-len(y) // size) if self.steps is None else self.steps
        for permutation in self.order(t, i):
            for low in range(0, len(y), size):
                if left == 0:
                    return
                left -= 1
                rows = permutation[low : low + size]
                yield x[rows], y[rows]

    def loss_gradient(self, i: int, w: Array) -> Array:
        """Gradient of the client's loss over all its data."""
        return self.net.gradient(w, *self.data[i])

    def mean(self, chosen: Sequence[int], values: Mapping[int, Array], uniform: bool) -> Array:
        weights = np.array([1.0 if uniform else self.sizes[i] for i in chosen])
        return sum(weight * values[i] for weight, i in zip(weights / weights.sum(), chosen, strict=True))


Correct = Callable[[Array, Array], Array]


def keep(g: Array, w: Array) -> Array:
    return g


def descend(
    world: World,
    t: int,
    i: int,
    origin: Array,
    correct: Correct = keep,
    extra_decay: float = 0.0,
    term: Term | None = None,
    start: Array | None = None,
    rate: Callable[[int, int], float] = lambda k, steps: 1.0,
) -> tuple[Array, int]:
    """Client i's local SGD in round t: its last iterate and its number of steps.

    It starts at `start` if that is not `origin`; `rate(k, K)` is the factor of the learning rate in step k of K.
    """
    w, v, steps = (origin if start is None else start).copy(), np.zeros_like(origin), 0
    batches = list(world.minibatches(t, i))
    for x, y in batches:
        lr = world.lr_in(t) * rate(steps, len(batches))

        def f(at: Array, x: Array = x, y: Array = y) -> Array:
            return world.net.gradient(at, x, y, term or world.term)

        f.x = x  # for rules that ask about more than the gradient
        g = correct(world.rule(f, w), w)
        if world.clip is not None:
            g = g * min(1.0, world.clip / (np.linalg.norm(g) + 1e-6))
        g = g + (world.weight_decay + extra_decay) * w
        v = world.momentum * v + g
        w = world.constraint(w - lr * (g + world.momentum * v if world.nesterov else v), origin)
        steps += 1
    return w, steps


@dataclass
class Result:
    """Final weights, the weights sent in every round, and what server and clients keep."""

    w: Array
    sent: list[Array] = field(default_factory=list)
    server: dict[str, Array] = field(default_factory=dict)
    client: dict[int, dict[str, Array]] = field(default_factory=dict)


# ---- methods without client state ----

Step = Callable[[int, Array, Array], Array]


def averaging(world: World, step: Step, uniform: bool = False, mu: float = 0.0) -> Result:
    """Local SGD (with a proximal pull μ), then `step(t, w, mean update)`."""
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        delta = {i: descend(world, t, i, w, lambda g, at, w=w: g + mu * (at - w))[0] - w for i in chosen}
        w = step(t, w, world.mean(chosen, delta, uniform))
    return Result(w, [*sent, w])


def fedavg(world: World, uniform: bool = False) -> Result:
    return averaging(world, lambda t, w, delta: w + world.server_lr * delta, uniform)


def fedprox(world: World, mu: float, uniform: bool = False) -> Result:
    return averaging(world, lambda t, w, delta: w + world.server_lr * delta, uniform, mu)


def fedavgm(world: World, beta: float, ema: bool = False) -> Result:
    v = np.zeros_like(world.start)

    def step(t: int, w: Array, delta: Array) -> Array:
        nonlocal v
        v = beta * v - (1 - beta if ema else 1) * delta
        return w - world.server_lr * v

    result = averaging(world, step)
    result.server = {"v": v}
    return result


def adaptive(
    world: World,
    kind: str,
    beta1: float,
    beta2: float,
    tau: float,
    v_init: float | None = None,
    bias_correction: bool = False,
) -> Result:
    """FedAdam, FedYogi and FedAdagrad."""
    m = np.zeros_like(world.start)
    v = np.full_like(world.start, tau**2 if v_init is None else v_init)

    def step(t: int, w: Array, delta: Array) -> Array:
        nonlocal m, v
        m, square = beta1 * m + (1 - beta1) * delta, delta**2
        if kind == "adam":
            v = beta2 * v + (1 - beta2) * square
        elif kind == "yogi":
            v = v - (1 - beta2) * square * np.sign(v - square)
        else:
            v = v + square
        first, second = (1 - beta1 ** (t + 1), 1 - beta2 ** (t + 1)) if bias_correction else (1, 1)
        return w + world.server_lr * (m / first) / (np.sqrt(v / second) + tau)

    result = averaging(world, step)
    result.server = {"v": v} | ({"m": m} if kind != "adagrad" or beta1 else {})
    return result


def step_weight(steps: int, momentum: float, nesterov: bool = False, pull: float = 0.0) -> float:
    """a_i: how far a constant gradient of −1 carries SGD at lr 1 from 0, with a pull (lr · μ) back to 0."""
    position = v = 0.0
    for _ in range(steps):
        g = pull * position - 1
        v = momentum * v + g
        position -= g + momentum * v if nesterov else v
    return position


def fednova(world: World, mu: float = 0.0) -> Result:
    """Normalised averaging; with a proximal pull its scale is the mean number of steps, as in the authors' code."""
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        weights, scale, delta = world.sizes[list(chosen)] / world.sizes[list(chosen)].sum(), 0.0, 0.0
        for p, i in zip(weights, chosen, strict=True):
            y, steps = descend(world, t, i, w, lambda g, at, w=w: g + mu * (at - w))
            a = step_weight(steps, world.momentum, world.nesterov, world.lr_in(t) * mu)
            scale += p * (steps if mu else a)
            delta = delta + p * (y - w) / a
        w = w + world.server_lr * scale * delta
    return Result(w, [*sent, w])


def mofedsam(world: World, beta: float, rho: float) -> Result:
    w, m, sent = world.start, np.zeros_like(world.start), []
    world = world.but(rule=sam(rho))
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {i: descend(world, t, i, w, lambda g, at, m=m: beta * g + (1 - beta) * m) for i in chosen}
        delta = world.mean(chosen, {i: y - w for i, (y, _) in ends.items()}, uniform=True)
        steps = np.mean([steps for _, steps in ends.values()])
        w, m = w + world.server_lr * delta, -delta / (steps * world.lr_in(t))
    return Result(w, [*sent, w], {"m": m})


def swa(world: World, start: float, cycle: int, lr_min: float, collect: str) -> Result:
    """FedAvg with a cyclical learning rate; `server["average"]` is the mean of the models collected."""
    rounds = len(world.participants)
    first = int(start * rounds)

    def schedule(t: int) -> float:
        tau = ((t - 1 if collect == "paper" else t) % cycle + 1) / cycle
        return world.lr if t < first or cycle == 1 else (1 - tau) * world.lr + tau * lr_min

    result = fedavg(world.but(schedule=schedule))
    if collect == "official":
        due = [t for t in range(rounds) if t > first and (t - first) % cycle == 0]
    elif collect == "paper":
        due = [t for t in range(rounds) if t >= first and t % cycle == 0]
    else:
        due = [t for t in range(rounds) if t >= first and t % cycle == cycle - 1]
    average = np.mean([result.sent[t + 1] for t in due], axis=0) if due else result.sent[first]
    result.server = {"average": average, "count": np.array(len(due))}
    return result


# ---- methods with client state ----


def zeros_for_all(world: World) -> Array:
    return np.zeros((world.clients, len(world.start)))


def kept(world: World, **arrays: Array) -> dict[int, dict[str, Array]]:
    """What the clients that ever took part keep."""
    seen = sorted({i for chosen in world.participants for i in chosen})
    return {i: {name: array[i] for name, array in arrays.items()} for i in seen}


def scaffold(world: World, option: int = 2, momentum_corrected: bool = False) -> Result:
    w, c, own, sent = world.start, np.zeros_like(world.start), zeros_for_all(world), []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        new, delta = own.copy(), {}
        for i in chosen:
            y, steps = descend(world, t, i, w, lambda g, at, c=c, i=i, own=own: g + c - own[i])
            delta[i] = y - w
            if momentum_corrected:
                steps = step_weight(steps, world.momentum, world.nesterov)
            new[i] = world.loss_gradient(i, w) if option == 1 else own[i] - c - delta[i] / (steps * world.lr_in(t))
        w = w + world.server_lr * world.mean(chosen, delta, uniform=True)
        c, own = c + (new - own).sum(0) / world.clients, new
    return Result(w, [*sent, w], {"c": c}, kept(world, c=own))


def feddyn(world: World, alpha: float, clip_split: bool = False) -> Result:
    """In the form of the authors' code: H_i sums the client's past updates."""
    w, drift, sent = world.start, zeros_for_all(world), []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {}
        for i in chosen:
            a = alpha / world.share[i]
            pull, extra = (0.0, a) if clip_split else (1.0, 0.0)
            ends[i], _ = descend(
                world,
                t,
                i,
                w,
                lambda g, at, a=a, pull=pull, h=drift[i], w=w: g + a * (pull * at - w + h),
                extra,
            )
        for i in chosen:
            drift[i] += ends[i] - w
        w = world.mean(chosen, ends, uniform=True) + drift.mean(0)
    return Result(w, [*sent, w], {"h": drift.mean(0)}, kept(world, h=drift))


def feddyn_paper(world: World, alpha: float) -> Result:
    """In the form of the paper, with gradient-like ĝ_i and h (equal sizes)."""
    w, ghat, h, sent = world.start, zeros_for_all(world), np.zeros_like(world.start), []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {i: descend(world, t, i, w, lambda g, at, i=i, w=w: g - ghat[i] + alpha * (at - w))[0] for i in chosen}
        for i in chosen:
            ghat[i] -= alpha * (ends[i] - w)
        h = h - alpha / world.clients * sum(ends[i] - w for i in chosen)
        w = world.mean(chosen, ends, uniform=True) - h / alpha
    return Result(w, [*sent, w], {"h": -h / alpha}, kept(world, h=-ghat / alpha))


def feddc(world: World, alpha: float, gradient_term: bool = True, drift_term: bool = True) -> Result:
    w, c, sent = world.start, np.zeros_like(world.start), []
    drift, own = zeros_for_all(world), zeros_for_all(world)
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends, change = {}, np.zeros_like(w)
        for i in chosen:
            a, common = alpha / world.share[i], c / world.share[i]
            shift = common - own[i] if gradient_term else 0.0
            ends[i], steps = descend(
                world, t, i, w, lambda g, at, a=a, s=shift, h=drift[i], w=w: g + a * (at - (w - h)) + s
            )
            new = own[i] - common - (ends[i] - w) / (steps * world.lr_in(t))
            change += world.share[i] * (new - own[i])
            own[i] = new
        for i in chosen:
            drift[i] += ends[i] - w
        c = c + change / world.clients
        w = world.mean(chosen, ends, uniform=True) + (drift.mean(0) if drift_term else 0.0)
    return Result(w, [*sent, w], {"h": drift.mean(0), "c": c}, kept(world, h=drift, c=own))


def adabest(world: World, beta: float, mu: float | Array) -> Result:
    """μ may differ from client to client."""
    mus = np.broadcast_to(mu, world.clients)
    w, mean, h, sent = world.start, world.start, zeros_for_all(world), []
    last: dict[int, int] = {}
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {i: descend(world, t, i, w, lambda g, at, i=i: g - h[i])[0] for i in chosen}
        for i in chosen:
            h[i] = (h[i] / (t - last[i]) if i in last else 0.0) + mus[i] * (w - ends[i])
            last[i] = t
        old, mean = mean, world.mean(chosen, ends, uniform=True)
        w = mean + beta * (mean - old)
    rounds = np.array([[last.get(i, -1) + 1] for i in range(world.clients)])
    return Result(w, [*sent, w], {"mean": mean}, kept(world, h=h, last=rounds))


def fedspeed(
    world: World,
    rho: float,
    alpha: float,
    mix: float = 1.0,
    clip_split: bool = False,
    server: str = "code",
    normalised: bool = True,
) -> Result:
    world = world.but(rule=lookahead(rho, mix, normalised))
    if server == "code":
        return feddyn(world, alpha, clip_split)
    w, drift, sent = world.start, zeros_for_all(world), []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {}
        for i in chosen:
            a = alpha / world.share[i]
            ends[i], _ = descend(world, t, i, w, lambda g, at, a=a, h=drift[i], w=w: g + a * (at - w + h))
        for i in chosen:
            drift[i] += ends[i] - w
        w = world.mean(chosen, {i: ends[i] + drift[i] for i in chosen}, uniform=True)
    return Result(w, [*sent, w], {}, kept(world, h=drift))


def moon(world: World, mu: float, temperature: float) -> Result:
    w, previous, sent = world.start, dict[int, Array](), []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {}
        for i in chosen:
            old = previous.get(i, w)
            term = contrast_term(
                mu,
                temperature,
                lambda x, w=w: world.net.features(w, x),
                lambda x, old=old: world.net.features(old, x),
            )
            ends[i], _ = descend(world, t, i, w, term=term)
        previous |= ends
        w = w + world.server_lr * (world.mean(chosen, ends, uniform=False) - w)
    return Result(w, [*sent, w], {}, {i: {"previous": y} for i, y in previous.items()})
