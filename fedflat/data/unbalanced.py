"""Partitions that deal every class out over the clients by a Dirichlet draw, so that sizes differ too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedflat.data.arrays import Targets
from fedflat.data.indices import Split
from fedflat.data.laws import log_dirichlet, positive, softmax
from fedflat.errors import PartitionError

WORK = 40_000_000  # bounds the redraws to seconds; a division that is at all likely comes far sooner


def dirichlet_per_class(
    targets: Targets, clients: int, rng: np.random.Generator, alpha: float = 0.5, minimum: int = 10
) -> Split:
    """Each class is dealt out by Dir(alpha · 1_N), full clients (n/N samples) getting no more (FedAlign).

    alpha: concentration of each client; small means few classes per client. minimum: samples the smallest
    client must have; everything is drawn again until it has. No sample is left over.
    """
    cap = len(targets.labels) / clients
    return _deal(
        targets,
        clients,
        rng,
        "dirichlet_per_class",
        alpha,
        minimum,
        lambda t: _capped(rng, t, clients, alpha, cap),
    )


def dirichlet_over_clients(
    targets: Targets,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 0.5,
    minimum: int = 10,
    compat: str = "",
) -> Split:
    """Each class is dealt out by Dir(alpha · 1_N), without a limit to a client's size (FedCONST).

    alpha: concentration of each client. minimum: samples the smallest client must have. compat: "fedtorch"
    rounds shares to two decimals and drops leftovers as that paper's author's code does, its only demand
    being that no client is empty.
    """
    if compat not in ("", "fedtorch"):
        raise PartitionError(f'dirichlet_over_clients: compat={compat!r} is unknown; give "fedtorch" or nothing')
    draw, least = (_rounded, 1) if compat else (_plain, minimum)
    name = "dirichlet_over_clients"
    return _deal(targets, clients, rng, name, alpha, least, lambda t: draw(rng, t, clients, alpha))


def _deal(
    targets: Targets,
    clients: int,
    rng: np.random.Generator,
    name: str,
    alpha: float,
    minimum: int,
    draw: Callable[[np.ndarray], np.ndarray],
) -> Split:
    """Draw tables of counts (C, N) until every client has the minimum, then hand out the samples."""
    positive(f"{name}: alpha", alpha)
    total = len(targets.labels)
    if minimum * clients > total:
        raise PartitionError(
            f"{name}: {clients} clients with a minimum={minimum} need {minimum * clients} samples, "
            f"there are {total}; lower minimum (at most {total // clients}) or clients"
        )
    class_sizes = np.bincount(targets.labels, minlength=targets.classes)
    best, attempts = -1, min(2000, max(100, WORK // (targets.classes * (clients + 500))))
    for _ in range(attempts):
        table = draw(class_sizes)
        smallest = int(table.sum(axis=0).min())
        if smallest >= minimum:
            return _hand_out(rng, targets.by_class(rng), table)
        best = max(best, smallest)
    raise PartitionError(
        f"{name}: in {attempts} draws with alpha={alpha} some client always had fewer than "
        f"minimum={minimum} samples (at best the smallest had {best}); "
        f"raise alpha, or lower clients={clients} or minimum"
    )


def _hand_out(rng: np.random.Generator, pools: list[np.ndarray], table: np.ndarray) -> Split:
    ends = np.cumsum(table, axis=1)
    starts = ends - table
    parts = (
        np.concatenate([pool[a[i] : b[i]] for pool, a, b in zip(pools, starts, ends, strict=True)])
        for i in range(table.shape[1])
    )
    return Split.of(rng.permutation(part) for part in parts)


def _cut(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Counts from cutting at floor(cumulative share · size); the small term mends sums like 0.999…9."""
    ends = np.floor(np.cumsum(shares, axis=-1) * sizes[..., None] + 1e-6).astype(np.int64)
    return np.diff(ends, axis=-1, prepend=0)


def _plain(rng: np.random.Generator, sizes: np.ndarray, clients: int, alpha: float) -> np.ndarray:
    return _cut(softmax(log_dirichlet(rng, np.full((len(sizes), clients), alpha))), sizes)


def _capped(rng: np.random.Generator, sizes: np.ndarray, clients: int, alpha: float, cap: float) -> np.ndarray:
    """Class after class, since who is full depends on the classes before."""
    logs = log_dirichlet(rng, np.full((len(sizes), clients), alpha))
    table = np.zeros((len(sizes), clients), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for label, size in enumerate(sizes):
        if size == 0:
            continue  # perhaps nobody has room any more, and nothing is left to deal out
        shares = softmax(np.where(held < cap, logs[label], -np.inf))
        table[label] = _cut(shares, np.array(size))
        held += table[label]
    return table


def _rounded(rng: np.random.Generator, sizes: np.ndarray, clients: int, alpha: float) -> np.ndarray:
    shares = np.round(softmax(log_dirichlet(rng, np.full((len(sizes), clients), alpha))), 2)
    wanted = np.floor(shares * sizes[:, None] + 1e-9).astype(np.int64)
    ends = np.minimum(np.cumsum(wanted, axis=1), sizes[:, None])  # rounding up may ask for more than there is
    return np.diff(ends, axis=1, prepend=0)
