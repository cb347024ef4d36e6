"""Ways to divide a pool among clients that need no Dirichlet draw, and the registry of all of them.

A partitioner is `(targets, clients, rng, **options) -> IndexSets`; each sample goes to one client at most.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedflat.core.streams import numpy_stream
from fedflat.data.arrays import Targets
from fedflat.data.dirichlet import dirichlet_equal, lda_hsu, pam
from fedflat.data.given import given
from fedflat.data.indices import IndexSets, Resample, Split
from fedflat.data.unbalanced import dirichlet_over_clients, dirichlet_per_class
from fedflat.errors import PartitionError
from fedflat.specs import build, parse


def iid(targets: Targets, clients: int, rng: np.random.Generator) -> Split:
    """Shuffle and cut into equal parts (sizes differ by one at most; no sample is left over)."""
    return Split.of(np.array_split(rng.permutation(len(targets.labels)), clients))


def iid_stratified(targets: Targets, clients: int, rng: np.random.Generator) -> Split:
    """The same number of samples of every class for every client (MAN paper, CIFAR-100 iid).

    Every class must be divisible by the number of clients.
    """
    pools = targets.by_class(rng)
    for label, members in enumerate(pools):
        if len(members) % clients:
            raise PartitionError(
                f"iid_stratified: class {label} has {len(members)} samples, which {clients} clients "
                "cannot share equally; choose a number of clients that divides it, or use partition 'iid'"
            )
    parts = [np.split(members, clients) for members in pools]
    return Split.of(np.concatenate([part[i] for part in parts]) for i in range(clients))


def central(targets: Targets, clients: int, rng: np.random.Generator) -> Split:
    """One client with everything: centralised training, the baseline of the FedASAM paper. Needs clients=1."""
    if clients != 1:
        raise PartitionError(f"central gives everything to one client, but clients={clients}; set clients=1")
    return Split.of([rng.permutation(len(targets.labels))])


def natural(targets: Targets, clients: int, rng: np.random.Generator) -> Split:
    """One client a writer, where the data set knows them (MNIST with mnist_writers.npz).

    If `clients` is smaller than the number of writers, the `clients` writers with most samples take part and
    the others' samples are left over.
    """
    if targets.writers is None:
        raise PartitionError(
            "natural: this data set does not say who wrote what; use mnist with mnist_writers.npz in its folder"
        )
    writers, counts = np.unique(targets.writers, return_counts=True)
    if clients > len(writers):
        raise PartitionError(
            f"natural: {clients} clients asked, but there are {len(writers)} writers; set clients to that"
        )
    chosen = np.sort(np.argsort(-counts, kind="stable")[:clients])
    order = np.argsort(targets.writers, kind="stable")
    parts = np.split(order, np.cumsum(counts)[:-1])
    return Split.of(rng.permutation(parts[writer]) for writer in chosen)


def pathological(targets: Targets, clients: int, rng: np.random.Generator, labels: int = 3) -> Split:
    """Every client holds shards of exactly `labels` classes, of equal size (PLGU).

    labels: classes per client. Each class is cut into clients · labels / C shards, which must be a whole
    number.
    """
    classes = targets.classes
    if not 1 <= labels <= classes:
        raise PartitionError(f"pathological: labels={labels} must lie between 1 and the number of classes, {classes}")
    if clients * labels % classes:
        raise PartitionError(
            f"pathological: clients · labels = {clients * labels} is no multiple of the {classes} classes, "
            "so they cannot be cut into equal shards; try labels or clients such that it is "
            f"(clients={classes} always works)"
        )
    count = clients * labels // classes
    pools = targets.by_class(rng)
    smallest = min(map(len, pools))
    if smallest < count:
        raise PartitionError(
            f"pathological: a class has {smallest} samples for {count} shards; use fewer clients or labels"
        )
    shards = [np.array_split(pool, count) for pool in pools]
    held: list[np.ndarray] = [np.empty(0, np.int64)] * clients
    for client in rng.permutation(clients):
        left = np.array([len(shard) for shard in shards])
        # Always the fullest classes, ties at random: this never runs into a dead end.
        chosen = np.lexsort((rng.random(classes), -left))[:labels]
        held[client] = np.concatenate([shards[label].pop() for label in chosen])
    return Split.of(held)


def resample(targets: Targets, clients: int, rng: np.random.Generator, size: int = 50) -> Resample:
    """Virtual clients for tests of scale: each draws `size` samples of the pool, computed when asked for.

    Unlike in every other partition, clients share samples. A million clients cost no memory.
    """
    if not 1 <= size <= len(targets.labels):
        raise PartitionError(
            f"resample: size={size} must lie between 1 and the {len(targets.labels)} samples there are"
        )
    return Resample(clients, size, len(targets.labels), int(rng.integers(2**62)))


PARTITIONS: dict[str, Callable[..., IndexSets]] = {
    maker.__name__: maker
    for maker in (
        iid,
        iid_stratified,
        dirichlet_equal,
        lda_hsu,
        dirichlet_per_class,
        dirichlet_over_clients,
        pam,
        pathological,
        central,
        natural,
        given,
        resample,
    )
}


def divide(targets: Targets, partition: str, clients: int, seed: int) -> IndexSets:
    """Divide the samples as a string such as `"dirichlet_equal(delta=0.3)"` says; the seed decides all."""
    call = parse(partition)
    if clients < 1:
        raise PartitionError(f"clients={clients}: at least one client is needed")
    if clients > len(targets.labels) and call.name != "resample":
        raise PartitionError(
            f"{call.name}: {clients} clients cannot share {len(targets.labels)} samples; use fewer clients, or "
            "partition 'resample', in which clients share samples"
        )
    return build("partition", call, PARTITIONS, targets, clients, numpy_stream(seed, "partition"))
