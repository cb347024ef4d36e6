"""Tables of Hugging Face as clients: by a column, by a partition, or as a partitioner deals them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import Targets
from fedflat.data.indices import Split
from fedflat.data.partition import divide
from fedflat.data.pooled import PooledClients
from fedflat.data.samples import Columns, TableSamples, is_table
from fedflat.errors import InputError, UnknownNameError

TESTS = ("test", "validation")  # names of a split that serves as test set


class Partitions(Sequence[Any]):
    """Clients as a partitioner of flwr-datasets hands them out, one table each, when they are asked for."""

    def __init__(self, partitioner: Any) -> None:
        self.partitioner = partitioner

    def __len__(self) -> int:
        return int(self.partitioner.num_partitions)

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.partitioner.load_partition(client)


def split_of(dataset: Any, test: Any) -> tuple[Any, Any]:
    """Training and test table of a table, or of a dictionary of splits. test: a table, or the name of a split."""
    if not isinstance(dataset, Mapping):
        return dataset, test
    if "train" not in dataset:
        raise UnknownNameError("split", "train", list(dataset))
    if isinstance(test, str) and test not in dataset:
        raise UnknownNameError("split", test, list(dataset))
    name = test if isinstance(test, str) else next((name for name in TESTS if name in dataset), None)
    return dataset["train"], dataset[name] if name is not None and (test is None or isinstance(test, str)) else test


def columns_of(table: Any, columns: Columns | None, besides: str | None = None) -> Columns:
    """The input and target columns: as given, or the only class label and the only column besides."""
    if columns is not None or not hasattr(table, "features"):
        return columns  # type: ignore[return-value]
    targets = [name for name, feature in table.features.items() if hasattr(feature, "names") and name != besides]
    inputs = [name for name in table.features if name not in (*targets, besides)]
    if len(targets) != 1 or len(inputs) != 1:
        raise InputError(
            f'say which columns are input and target, columns=("image", "label"): it has {", ".join(table.features)}'
        )
    return inputs[0], targets[0]


def pooled(table: Any, columns: Columns, where: str) -> TableSamples:
    """A table with its labels, which are one column of numbers; inputs are read when they are asked for."""
    samples = TableSamples(table, columns, where)
    values = np.asarray(table.with_format(None)[columns[1]] if hasattr(table, "with_format") else table[columns[1]])
    if values.ndim == 1 and values.dtype.kind in "iu":
        samples.labels = torch.from_numpy(values.astype(np.int64))
    return samples


def clients_of(
    dataset: Any, by: str | None, partition: Any, clients: int, seed: int, columns: Columns | None, test: Any
) -> dict[str, Any]:
    """What `Federation` is given for `Federation.from_huggingface`."""
    if (by is None) == (partition is None) and not hasattr(dataset, "load_partition"):
        raise InputError('say who holds what: by="column", or partition="dirichlet_per_class(alpha=0.5)"')
    if hasattr(dataset, "load_partition"):
        dataset, partition = None, dataset
    train, test = split_of(dataset, test)
    if hasattr(partition, "load_partition"):
        return _dealt(train, partition, columns, test)
    if not is_table(train):
        raise InputError(f"expected a data set of Hugging Face, got {type(train).__name__}")
    columns = columns_of(train, columns, by)
    samples = pooled(train, columns, "the data set")
    common = {"test": None if test is None else pooled(test, columns, "the test set"), **_classes(train, columns)}
    if by is not None:
        return common | {"train": grouped(samples, train, by), "partition": "natural"}
    if samples.labels is None:
        raise InputError(f"a partition needs class labels; the target {columns[1]!r} holds something else")
    count = common.get("classes") or 1 + int(samples.labels.max())
    sets = divide(Targets(samples.labels.numpy(), count), partition, clients, seed)
    return common | {"train": PooledClients(samples, samples.labels, sets), "partition": partition}


def grouped(samples: TableSamples, table: Any, by: str) -> dict[str, TableSamples]:
    """The rows of every value of a column, by that value."""
    if by not in table.column_names:
        raise UnknownNameError("column", by, table.column_names)
    values, inverse = np.unique(np.asarray(table.with_format(None)[by]), return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    sets = Split(order, np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(values)))]))
    return {str(value): samples[torch.from_numpy(sets.indices(i))] for i, value in enumerate(values)}


def _dealt(train: Any, partitioner: Any, columns: Columns | None, test: Any) -> dict[str, Any]:
    if train is not None:
        partitioner.dataset = train
    clients = Partitions(partitioner)
    first = clients[0]
    columns = columns_of(first, columns)
    own = None if test is None else pooled(test, columns, "the test set")
    how = type(partitioner).__name__
    return {"train": clients, "test": own, "columns": columns, "partition": how, **_classes(first, columns)}


def _classes(table: Any, columns: Columns) -> dict[str, Any]:
    """The number and the names of the classes, where the table tells."""
    names = getattr(getattr(table, "features", {}).get(columns[1]), "names", None)
    return {} if names is None else {"classes": len(names), "class_names": names}
