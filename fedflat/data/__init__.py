"""Data sets in publishers' formats, partitioners, preprocessing; `load_federation` ties them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedflat.core.samples import Samples
from fedflat.data.arrays import Pool
from fedflat.data.datasets import POOLS as WHOLE
from fedflat.data.federation import DatasetSamples, Federation, TensorSamples
from fedflat.data.hf import hf
from fedflat.data.indices import Holdout, Split, matching_tests
from fedflat.data.natural import HOMES, NATURAL, as_it_is
from fedflat.data.partition import PARTITIONS, divide
from fedflat.data.pooled import PooledClients
from fedflat.data.preprocess import Preprocess
from fedflat.data.recipes import recipe
from fedflat.data.share import split_call
from fedflat.data.sources import SOURCES, data_root, fetch, locate
from fedflat.errors import InputError
from fedflat.specs import build, parse

__all__ = [
    "DATASETS",
    "HOMES",
    "NATURAL",
    "PARTITIONS",
    "SOURCES",
    "DatasetSamples",
    "Federation",
    "Preprocess",
    "Samples",
    "TensorSamples",
    "data_root",
    "fetch",
    "load_federation",
    "locate",
    "recipe",
]

POOLS: dict[str, Callable[..., Pool | Federation]] = {**WHOLE, "hf": hf}
DATASETS: dict[str, Callable[..., Pool | Federation]] = {**POOLS, **NATURAL}
"""Every data set by its name in `load_federation` and on the command line."""


def load_federation(
    data: str,
    partition: str | None = None,
    clients: int = 100,
    seed: int = 0,
    root: str | Path | None = None,
    augment: str = "auto",
    local_holdout: float = 0.0,
) -> Federation:
    """A data set, divided among clients.

    data: a name of `DATASETS`, such as "cifar10", "cifar10(share=0.2)" (see `data.share`) or 'npz(path="my.npz")'.
    partition: one of `PARTITIONS`, with options; None is "iid", or the data set's own clients where it has them.
    root: where data sets lie; else $FEDFLAT_DATA, else a cache folder (see `locate`). augment: the recipe of
    preprocessing (see `recipe`). local_holdout: share of every client's samples that becomes its own test set; with 0
    that is a part of the common test set with the client's mixture of labels.
    """
    if parse(data).name not in NATURAL:
        recipe(augment, parse(data).name)  # a wrong name is told before data are read
    return federation_of(load_pool(data, root), data, partition, clients, seed, augment, local_holdout)


def load_pool(data: str, root: str | Path | None = None) -> Pool | Federation:
    """All samples of a data set, undivided unless its clients are given. data, root: see `load_federation`."""
    call, place = parse(data), None if root is None else Path(root)
    if call.name in NATURAL:
        return build("data set", call, NATURAL, place)
    return build("data set", split_call(call)[0], POOLS, place)


def federation_of(
    pool: Pool | Federation,
    data: str,
    partition: str | None,
    clients: int,
    seed: int,
    augment: str = "auto",
    local_holdout: float = 0.0,
) -> Federation:
    """Samples divided among clients; see `load_federation`. The pool is shared, not copied."""
    if isinstance(pool, Federation):
        return as_it_is(pool, data, partition, clients, augment, local_holdout)
    partition = partition or "iid"
    if not 0 <= local_holdout < 1:
        raise InputError(f"local_holdout={local_holdout} must lie in [0, 1)")
    call, share = split_call(parse(data))
    name, pool = call.name, share.drawn(pool, seed)
    sets = divide(pool.targets, partition, clients, seed)
    tests = None
    if local_holdout:
        tests = PooledClients(pool.x, pool.y, Holdout(sets, local_holdout, seed, test=True))
        sets = Holdout(sets, local_holdout, seed, test=False)
    elif isinstance(sets, Split):
        matching = matching_tests(sets, pool.targets.labels, pool.test_y.numpy(), seed)
        tests = PooledClients(pool.test_x, pool.test_y, matching)
    return Federation(
        PooledClients(pool.x, pool.y, sets),
        pool.test,
        tests,
        classes=pool.targets.classes,
        preprocess=recipe(augment, name),
        prefetch=pool.lazy,
        name=data,
        partition=partition,
    )
