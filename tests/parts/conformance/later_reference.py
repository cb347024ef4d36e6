"""The methods since the five papers in NumPy float64, written from their formulas; see `reference`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .reference import Array, Gradient, Result, Rule, Term, World, descend, kept, plain, sam, zeros_for_all


def unit(v: Array) -> Array:
    return v / (np.linalg.norm(v) + 1e-16)


def at(shift: Array) -> Rule:
    """The gradient at a displaced point."""
    return lambda f, w: f(w + shift)


def shared(world: World, delta: Array, w: Array) -> Array:
    return w + world.server_lr * delta


# ---- momentum of the federation ----


def fedcm(world: World, alpha: float, rule: Rule = plain) -> Result:
    w, m, sent, world = world.start, np.zeros_like(world.start), [], world.but(rule=rule)
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends = {i: descend(world, t, i, w, lambda g, at, m=m: alpha * g + (1 - alpha) * m) for i in chosen}
        delta = np.mean([y - w for y, _ in ends.values()], axis=0)
        w = w + world.server_lr * delta
        m = -delta / (np.mean([k for _, k in ends.values()]) * world.lr_in(t))
    return Result(w, sent, {"m": m})


def fedacg(world: World, lam: float, beta: float) -> Result:
    w, m, sent = world.start, np.zeros_like(world.start), []
    for t, chosen in enumerate(world.participants):
        ahead = w + lam * m
        sent.append(ahead)
        ends = [descend(world, t, i, ahead, lambda g, at, a=ahead: g + beta * (at - a))[0] for i in chosen]
        m = lam * m + np.mean(ends, axis=0) - ahead
        w = w + m
    return Result(w, sent, {"m": m})


def fedwmsam(world: World, alpha: float, rho: float, rate: float) -> Result:
    w, sent, own = world.start, [], zeros_for_all(world)
    m, c = np.zeros_like(w), np.zeros_like(w)
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        new, deltas, steps, similarity = own.copy(), [], [], []
        for i in chosen:
            mixed, done = m + alpha / (1 - alpha) * (c - own[i]), [0]

            def rule(f: Gradient, at: Array, w: Array = w, mixed: Array = mixed, done: list[int] = done) -> Array:
                ahead = w + done[0] * mixed - at
                done[0] += 1
                return f(at + rho * unit(ahead))

            y, k = descend(world.but(rule=rule), t, i, w, lambda g, at, a=alpha, mixed=mixed: a * g + (1 - a) * mixed)
            delta = y - w
            new[i] = own[i] - c - delta / (k * world.lr_in(t))
            lengths = np.linalg.norm(delta) * np.linalg.norm(m)
            similarity.append(1 + delta @ m / lengths if lengths > 0 else 0.0)
            deltas.append(delta)
            steps.append(k)
        delta = np.mean(deltas, axis=0)
        w = w + world.server_lr * delta
        c, own = c + (new - own).sum(0) / world.clients, new
        alpha = (1 - rate) * alpha + rate * min(0.9, max(0.1, np.mean(similarity)))
        m = -delta / (np.mean(steps) * world.lr_in(t))
    return Result(w, sent, {"m": m, "c": c, "alpha": np.array(alpha)}, kept(world, c=own))


# ---- FedDyn's dual with sharpness ----


def fedsmoo(world: World, rho: float, alpha: float, server: str = "code") -> Result:
    w, sent = world.start, []
    drift, dual, s = zeros_for_all(world), zeros_for_all(world), np.zeros_like(world.start)
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        ends, told = {}, []
        for i in chosen:
            last = [np.zeros_like(w)]

            def rule(f: Gradient, at: Array, i: int = i, s: Array = s, last: list[Array] = last) -> Array:
                last[0] = rho * unit(f(at) - dual[i] - s)
                dual[i] += last[0] - s
                return f(at + last[0])

            a, h = alpha / world.share[i], drift[i].copy()
            ends[i], _ = descend(world.but(rule=rule), t, i, w, lambda g, at, a=a, h=h, w=w: g + a * (at - w + h))
            told.append(dual[i] - last[0] if server == "paper" else dual[i].copy())
        for i in chosen:
            drift[i] += ends[i] - w
        w = np.mean(list(ends.values()), axis=0) + drift.mean(0)
        s = rho * unit(np.mean(told, axis=0))
    return Result(w, sent, {"h": drift.mean(0), "s": s}, kept(world, h=drift, mu=dual))


def fedgloss(
    world: World,
    rho: float,
    rho_l: float,
    beta: float,
    server: str = "paper",
    warmup: int = 0,
    rho_0: float = 0.001,
) -> Result:
    w, sent, drift = world.start, [], zeros_for_all(world)
    d, mean_drift = np.zeros_like(w), np.zeros_like(w)
    for t, chosen in enumerate(world.participants):
        here, there = (r if t >= warmup else rho_0 + t / warmup * (r - rho_0) for r in (rho_l, rho))
        start = w + there * unit(d)
        sent.append(start)
        ends = {}
        for i in chosen:
            a, h = 1 / beta / world.share[i], drift[i].copy()
            near = world.but(rule=sam(here))
            ends[i], _ = descend(near, t, i, start, lambda g, at, a=a, h=h, s=start: g + a * (at - s + h))
        for i in chosen:
            drift[i] += ends[i] - start
        changes = [ends[i] - start for i in chosen]
        mean_drift = mean_drift + sum(changes) / world.clients / (len(chosen) if server == "code" else 1)
        delta = np.mean(changes, axis=0)
        w, d = w + delta + mean_drift, -delta
    return Result(w, sent, {"h": mean_drift, "d": d}, kept(world, h=drift))


# ---- perturbations by global models ----


def fedlesam(world: World, rho: float, direction: str = "own") -> Result:
    w, sent, old = world.start, [], dict[int, Array]()
    for t, chosen in enumerate(world.participants):
        ends = {}
        for i in chosen:
            before = old.get(i, w) if direction == "own" else (sent[-1] if sent else w)
            ends[i], _ = descend(world.but(rule=at(rho * unit(before - w))), t, i, w)
            old[i] = w
        sent.append(w)
        w = shared(world, world.mean(chosen, {i: y - w for i, y in ends.items()}, uniform=False), w)
    if direction == "last":
        return Result(w, sent, {"old": sent[-1]})
    return Result(w, sent, {}, {i: {"old": v} for i, v in old.items()})


def fedgf(world: World, rho: float, rho_g: float, threshold: float, window: int) -> Result:
    w, sent, above = world.start, [], list[float]()
    for t, chosen in enumerate(world.participants):
        p = w + rho_g * unit((sent[-1] if sent else w) - w)
        c = float(np.mean(above[-window:])) if above else 0.0

        def rule(f: Gradient, at: Array, p: Array = p, c: float = c) -> Array:
            return f(c * p + (1 - c) * (at + rho * unit(f(at))))

        sent.append(w)
        delta = {i: descend(world.but(rule=rule), t, i, w)[0] - w for i in chosen}
        above.append(float(np.mean([np.linalg.norm(v) for v in delta.values()]) > threshold))
        w = shared(world, world.mean(chosen, delta, uniform=False), w)
    return Result(w, sent, {"last": sent[-1]})


# ---- the received model's outputs ----


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def from_logits(net: Any, w: Array, x: Array, residual: Array) -> Array:
    """The gradient of the weights, given that of the outputs: a squared error with a target that has this residual."""
    return net.gradient(w, x, net.output(w, x) - len(x) * residual)


def fedsol(world: World, rho: float, temperature: float, spans: list[tuple[slice, tuple[int, ...]]] | None) -> Result:
    """With `spans`, the tensors' places and shapes, the perturbation is adaptive."""
    w, sent, net = world.start, [], world.net
    for t, chosen in enumerate(world.participants):
        sent.append(w)

        def rule(f: Any, at: Array, w: Array = w) -> Array:
            if np.array_equal(at, w):
                return f(at)
            now, before = (softmax(net.output(v, f.x) / temperature) for v in (at, w))
            step = rho * unit(from_logits(net, at, f.x, (now - before) / temperature / len(f.x)))
            for place, shape in spans or ():
                change = np.abs(at - w)[place].reshape(shape)
                norm = np.linalg.norm(change, axis=0, keepdims=True)
                step[place] *= (change / np.where(norm > 0, norm, 1)).ravel()
            return f(at + step)

        delta = {i: descend(world.but(rule=rule), t, i, w)[0] - w for i in chosen}
        w = shared(world, world.mean(chosen, delta, uniform=False), w)
    return Result(w, sent)


@dataclass(frozen=True)
class Classifier:
    """A network with labels as targets. `extra(z, x, y)` is added to the gradient of the outputs, `shift` to them."""

    net: Any
    extra: Callable[[Array, Array, Array], Array] | None = None
    shift: Array | float = 0.0

    def output(self, w: Array, x: Array) -> Array:
        return self.net.output(w, x)

    def gradient(self, w: Array, x: Array, y: Array, term: Term | None = None) -> Array:
        z = self.output(w, x)
        residual = (softmax(z + self.shift) - np.eye(z.shape[1])[y]) / len(x)
        if self.extra:
            residual = residual + self.extra(z, x, y)
        return from_logits(self.net, w, x, residual)


def fedntd(world: World, beta: float, tau: float, rule: Rule = plain) -> Result:
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)

        def extra(z: Array, x: Array, y: Array, w: Array = w) -> Array:
            others = np.eye(z.shape[1])[y] == 0
            before, now = (softmax(v[others].reshape(len(x), -1) / tau) for v in (world.net.output(w, x), z))
            out = np.zeros_like(z)
            out[others] = (beta * tau * (now - before) / len(x)).ravel()
            return out

        here = world.but(net=Classifier(world.net, extra), rule=rule)
        delta = {i: descend(here, t, i, w)[0] - w for i in chosen}
        w = shared(world, world.mean(chosen, delta, uniform=False), w)
    return Result(w, sent)


def fedlc(world: World, tau: float, form: str, classes: int, rule: Rule = plain) -> Result:
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        delta = {}
        for i in chosen:
            n = np.array([np.sum(world.data[i][1] == c) for c in range(classes)], dtype=float)
            with np.errstate(divide="ignore"):
                shift = tau * np.log(n) if form == "log" else -tau * n**-0.25
            shift[n == 0] = -np.inf
            here = world.but(net=Classifier(world.net, shift=shift), rule=rule)
            delta[i] = descend(here, t, i, w)[0] - w
        w = shared(world, world.mean(chosen, delta, uniform=False), w)
    return Result(w, sent)


def correlation_term(beta: float) -> Term:
    """Gradient of FedDecorr's penalty with respect to the features."""

    def term(f: Array, x: Array) -> Array:
        n, d = f.shape
        if n < 2:
            return np.zeros_like(f)
        s = np.sqrt(f.var(0, ddof=1) + 1e-8)
        z = (f - f.mean(0)) / s
        m = z.T @ z
        np.fill_diagonal(m, 0)
        back = 4 * beta / (d * (d - 1) * n) * z @ m
        centred = (back - z * (back * z).sum(0) / (n - 1)) / s
        return centred - centred.mean(0)

    return term


# ---- rates within the round, starts, server rules ----


def falling(rho: float) -> Callable[[int, int], float]:
    return lambda k, steps: 1 - (1 - rho) * k / steps


def fedswa(world: World, rho: float, alpha: float) -> Result:
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        w = w + alpha * np.mean([descend(world, t, i, w, rate=falling(rho))[0] - w for i in chosen], axis=0)
    return Result(w, sent)


def fedmoswa(world: World, rho: float, alpha: float, gamma: float, option: int = 2) -> Result:
    w, sent, m, own = world.start, [], np.zeros_like(world.start), zeros_for_all(world)
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        deltas = []
        for i in chosen:
            c = own[i].copy()
            y, k = descend(world, t, i, w, lambda g, at, m=m, c=c: g + m - c, rate=falling(rho))
            path = world.lr_in(t) * (k * (1 + rho) + 1 - rho) / 2
            own[i] = world.loss_gradient(i, w) if option == 1 else own[i] - m - (y - w) / path
            deltas.append(y - w)
        w = w + alpha * np.mean(deltas, axis=0)
        m = m + gamma * (np.mean([own[i] for i in chosen], axis=0) - m)
    return Result(w, sent, {"c": m}, kept(world, c=own))


def fedinit(world: World, beta: float, variant: str = "paper", mu: float = 0.0) -> Result:
    """With FedProx's pull μ, to see where it goes."""
    w, sent, last = world.start, [], dict[int, Array]()
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        delta = {}
        for i in chosen:
            old = last.get(i, w if variant == "paper" else world.start)
            start = w + beta * (w - old)
            anchor = w if variant == "paper" else start
            last[i], _ = descend(world, t, i, anchor, lambda g, at, a=anchor: g + mu * (at - a), start=start)
            delta[i] = last[i] - anchor
        w = shared(world, world.mean(chosen, delta, uniform=False), w)
    return Result(w, sent, {}, {i: {"last": y} for i, y in last.items()})


def fedexp(world: World, eps: float, variant: str = "paper") -> Result:
    """The last entry of `sent` holds the server's learning rates."""
    w, sent, rates = world.start, [], []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        delta = {i: descend(world, t, i, w)[0] - w for i in chosen}
        mean = world.mean(chosen, delta, uniform=False)
        squares = world.mean(chosen, {i: v @ v for i, v in delta.items()}, uniform=False)
        small = eps if variant == "paper" else len(chosen) * eps * (world.lr_in(t) / world.lr_in(0)) ** 2
        rates.append(max(1.0, squares / (2 * (mean @ mean + small))))
        w = w + rates[-1] * mean
    return Result(w, [*sent, np.array(rates)], {"last": sent[-1]})


def loss_of(world: World, i: int, w: Array) -> float:
    x, y = world.data[i]
    return float(0.5 * ((world.net.output(w, x) - y) ** 2).sum(1).mean())


def qfedavg(world: World, q: float) -> Result:
    """In the paper's form, with gradient-like a_i and the Lipschitz constant 1/η."""
    w, sent = world.start, []
    for t, chosen in enumerate(world.participants):
        sent.append(w)
        lr, up, down = world.lr_in(t), np.zeros_like(w), 0.0
        for i in chosen:
            loss, a = loss_of(world, i, w) + 1e-10, (w - descend(world, t, i, w)[0]) / lr
            up = up + loss**q * a
            down += q * loss ** (q - 1) * (a @ a) + loss**q / lr
        w = w - up / down
    return Result(w, sent)


def ifca(world: World, models: Array) -> tuple[Array, dict[int, int]]:
    """The models after the last round, and every participant's last choice."""
    models, choices = models.copy(), dict[int, int]()
    for t, chosen in enumerate(world.participants):
        picked = {i: int(np.argmin([loss_of(world, i, m) for m in models])) for i in chosen}
        ends = {i: descend(world, t, i, models[j])[0] for i, j in picked.items()}
        for j in range(len(models)):
            mine = [ends[i] for i in chosen if picked[i] == j]
            if mine:
                models[j] = np.mean(mine, axis=0)
        choices |= picked
    return models, choices
