"""Partitions into clients of equal size whose class mixtures are drawn from a Dirichlet distribution.

The same number means different things: `delta` is a class's concentration, `alpha` of `lda_hsu` the total
over classes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from fedflat.data.arrays import Targets
from fedflat.data.indices import Split
from fedflat.data.laws import log_dirichlet, positive, softmax
from fedflat.errors import PartitionError

Law = Callable[[np.ndarray], np.ndarray]  # from the mask of classes that are not exhausted to their weights


def dirichlet_equal(
    targets: Targets, clients: int, rng: np.random.Generator, delta: float = 0.3, sigma: float = 0.0
) -> Split:
    """Equal sizes, mixtures q ~ Dir(delta · 1), clients served in random turns (Acar et al.; MAN).

    delta: concentration of each class; small means few classes per client. sigma: 0 for equal sizes floor(n/N)
    (the rest is left over); else sizes follow a log-normal law of this width and use everything.
    """
    logs = log_dirichlet(rng, np.full((clients, targets.classes), positive("dirichlet_equal: delta", delta)))
    sizes = _sizes(rng, len(targets.labels), clients, sigma)
    pools = targets.by_class(rng)
    return Split.of(_serve_in_turns(rng, np.exp(logs - logs.max(axis=1, keepdims=True)), pools, sizes))


def _sizes(rng: np.random.Generator, total: int, clients: int, sigma: float) -> np.ndarray:
    if not 0 <= sigma < float("inf"):
        raise PartitionError(f"dirichlet_equal: sigma={sigma} must not be negative")
    if sigma == 0:
        return np.full(clients, total // clients)
    raw = rng.lognormal(np.log(total / clients), sigma, clients)
    ends = np.round(np.cumsum(raw) / raw.sum() * total).astype(np.int64)
    sizes: np.ndarray = np.maximum(np.diff(ends, prepend=0), 1)
    while sizes.sum() > total:  # only after lifting empty clients to one sample
        sizes[sizes.argmax()] -= 1
    return sizes


def _serve_in_turns(
    rng: np.random.Generator, weights: np.ndarray, pools: list[np.ndarray], sizes: np.ndarray
) -> list[np.ndarray]:
    """Give one sample at a time to a random client that is not full, of a class drawn from its weights.

    Plain Python over precomputed uniform numbers: a client's cumulative weights change only when a class runs
    out.
    """
    stacks = [pool.tolist() for pool in pools]
    alive = np.array([bool(stack) for stack in stacks])
    held: list[list[int]] = [[] for _ in sizes]
    cumulative: list[list[float]] = [[] for _ in sizes]
    known_at = [-1] * len(sizes)
    exhausted, quota = 0, sizes.tolist()
    waiting = [i for i, size in enumerate(quota) if size]
    uniforms = rng.random((int(sizes.sum()), 2)).tolist()
    for first, second in uniforms:
        place = int(first * len(waiting))
        client = waiting[place]
        if known_at[client] != exhausted:
            known_at[client] = exhausted
            cumulative[client] = list(accumulate((weights[client] * alive).tolist()))
        sums = cumulative[client]
        if sums[-1] <= 0.0:  # nothing of what the client wants is left: draw from what there is
            sums = list(accumulate(map(len, stacks)))
        label = bisect_right(sums, second * sums[-1])
        held[client].append(stacks[label].pop())
        if not stacks[label]:
            alive[label] = False
            exhausted += 1
        if len(held[client]) == quota[client]:
            waiting[place] = waiting[-1]
            waiting.pop()
    return [np.array(part, dtype=np.int64) for part in held]


def lda_hsu(targets: Targets, clients: int, rng: np.random.Generator, alpha: float = 0.5) -> Split:
    """Equal sizes, mixtures q ~ Dir(alpha · p), clients served one after the other (Hsu et al.; FedASAM).

    alpha: total concentration over all classes (p are the class frequencies); 0 gives every client one class,
    and needs a number of clients that is a multiple of the number of classes. Samples beyond equal sizes are
    left over.
    """
    if alpha == 0:
        return _one_class_each(targets, clients, rng)
    frequencies = np.bincount(targets.labels, minlength=targets.classes) / len(targets.labels)
    concentration = positive("lda_hsu: alpha", alpha) * frequencies[frequencies > 0]
    pools = targets.by_class(rng)

    def law() -> Law:
        logs = np.full(targets.classes, -np.inf)
        logs[frequencies > 0] = log_dirichlet(rng, concentration)
        weights = np.exp(logs - logs.max())
        return lambda alive: weights * alive

    return Split.of(_serve_one_by_one(rng, pools, clients, len(targets.labels) // clients, law))


def _one_class_each(targets: Targets, clients: int, rng: np.random.Generator) -> Split:
    if clients % targets.classes:
        raise PartitionError(
            f"lda_hsu: alpha=0 gives each client one class, so clients={clients} must be a multiple of the "
            f"{targets.classes} classes; change clients, or use a small positive alpha"
        )
    share = clients // targets.classes
    pools = targets.by_class(rng)
    size = min(len(targets.labels) // clients, *(len(pool) // share for pool in pools))
    if size == 0:
        raise PartitionError(f"lda_hsu: alpha=0 with {clients} clients leaves a class with fewer samples than clients")
    parts = [pool[k * size : (k + 1) * size] for pool in pools for k in range(share)]
    return Split.of(parts[i] for i in rng.permutation(clients))


def pam(
    targets: Targets,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 0.1,
    beta: float = 10.0,
    size: int = 100,
) -> Split:
    """Pachinko allocation over coarse and fine labels (FedASAM paper, CIFAR-100: 500 clients of 100).

    alpha: concentration of each coarse label in a client. beta: of each class within a coarse label. size:
    samples a client. Needs a data set with coarse labels.
    """
    if targets.coarse is None:
        raise PartitionError("pam: this data set has no coarse labels; use cifar100, or another partition")
    if size < 1 or clients * size > len(targets.labels):
        raise PartitionError(
            f"pam: {clients} clients of size={size} need {clients * size} samples, "
            f"there are {len(targets.labels)}; lower clients or size"
        )
    coarse, groups = targets.coarse, int(targets.coarse.max()) + 1
    over_coarse = np.full(groups, positive("pam: alpha", alpha))
    over_fine = np.full(targets.classes, positive("pam: beta", beta))
    pools = targets.by_class(rng)

    def law() -> Law:
        theta = softmax(log_dirichlet(rng, over_coarse))
        phi = np.exp(log_dirichlet(rng, over_fine))

        def weights(alive: np.ndarray) -> np.ndarray:
            left = phi * alive
            mass = np.bincount(coarse, left, groups)[coarse]
            within = np.divide(left, mass, out=np.zeros_like(left), where=mass > 0)
            out: np.ndarray = theta[coarse] * within
            return out

        return weights

    return Split.of(_serve_one_by_one(rng, pools, clients, size, law))


def _serve_one_by_one(
    rng: np.random.Generator, pools: list[np.ndarray], clients: int, size: int, law: Callable[[], Law]
) -> list[np.ndarray]:
    """Fill client 0, then client 1, … The order is part of the definition: the last ones get what is left."""
    left = np.array([len(pool) for pool in pools])
    held = []
    for _ in range(clients):
        taken = _take(rng, left, size, law())
        held.append(np.concatenate([pool[n - k : n] for pool, n, k in zip(pools, left, taken, strict=True)]))
        left = left - taken
    return held


def _take(rng: np.random.Generator, left: np.ndarray, size: int, law: Law) -> np.ndarray:
    """How many of each class a client takes, one draw after the other, classes leaving when they run out.

    Draws are independent until a class is exhausted, so whole runs of them are made at once.
    """
    taken = np.zeros_like(left)
    while (need := size - int(taken.sum())) > 0:
        room = left - taken
        weights = law(room > 0)
        if not weights.sum() > 0:
            return taken + rng.multivariate_hypergeometric(room, need)
        drawn = rng.choice(len(left), size=need, p=weights / weights.sum())
        rank = np.zeros(need, dtype=np.int64)
        for label in np.unique(drawn):
            rank[drawn == label] = np.arange(1, (drawn == label).sum() + 1)
        over = np.flatnonzero(rank > room[drawn])
        stop = int(over[0]) if len(over) else need
        taken += np.bincount(drawn[:stop], minlength=len(left))
    return taken
