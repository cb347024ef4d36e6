"""Data sets in publishers' formats, partitioners, preprocessing; `load_federation` ties them together."""

from __future__ import annotations

from pathlib import Path

from fedflat.calls import build, parse
from fedflat.data.datasets import DATASETS
from fedflat.data.federation import DatasetSamples, Federation, Samples, TensorSamples
from fedflat.data.indices import Holdout, PooledClients, Split, matching_tests
from fedflat.data.partition import PARTITIONS, divide
from fedflat.data.preprocess import Preprocess
from fedflat.data.recipes import recipe
from fedflat.data.sources import SOURCES, data_root, fetch, locate
from fedflat.errors import InputError

__all__ = [
    "DATASETS",
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


def load_federation(
    data: str,
    partition: str = "iid",
    clients: int = 100,
    seed: int = 0,
    root: str | Path | None = None,
    augment: str = "auto",
    local_holdout: float = 0.0,
) -> Federation:
    """A data set, divided among clients.

    data: a name of `DATASETS`, such as "cifar10" or 'npz(path="my.npz")'. partition: one of `PARTITIONS`,
    with options. root: where data sets lie; else $FEDFLAT_DATA, else a cache folder (see `locate`). augment:
    the recipe of preprocessing (see `recipe`). local_holdout: share of every client's samples that becomes
    its own test set; with 0 that is a part of the common test set with the client's mixture of labels.
    """
    if not 0 <= local_holdout < 1:
        raise InputError(f"local_holdout={local_holdout} must lie in [0, 1)")
    call = parse(data)
    preprocess = recipe(augment, call.name)
    pool = build("data set", call, DATASETS, None if root is None else Path(root))
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
        (pool.test_x, pool.test_y),
        tests,
        classes=pool.targets.classes,
        preprocess=preprocess,
        name=call.name,
    )
