"""The data of a federation: who holds what, the common test set, and how raw samples become model inputs."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.samples import Samples
from fedflat.data.pooled import PooledClients, pooled
from fedflat.data.preprocess import Preprocess
from fedflat.data.samples import (
    LOOK,
    Ahead,
    Chosen,
    Collate,
    Columns,
    DatasetSamples,
    TensorSamples,
    as_samples,
    is_table,
    labels_of,
    targets_at,
)
from fedflat.data.tables import clients_of, columns_of
from fedflat.errors import InputError
from fedflat.tasks.task import Task, task_for, task_of

__all__ = ["DatasetSamples", "Federation", "Samples", "TensorSamples"]

log = logging.getLogger(__name__)
OWN = "own"  # the partition of data that come as clients
FEW = 4  # samples, and clients, that are read of datasets where only a mistake is looked for
TESTED = 1000  # samples of a test set that are read to learn the number of classes
GLANCE = 1000  # clients of a lazy sequence that are looked at where looking at all could take for ever
MANY = 1 << 16  # clients whose tensors may be copied into one memory
IGNORED = -100  # the target that PyTorch's cross-entropy leaves out


class Federation:
    """Clients' data in any form.

    train: one entry per client: a pair `(x, y)` of tensors or arrays, a map-style dataset of such pairs, a table
        (pandas, Hugging Face), or `Samples`. Or a dict from the clients' names to these. Of a sequence only `len()` and
        `[i]` are used, so a lazy one may hold a million clients.
    test: the common test set, in any of these forms; or several by name, {"seen": …, "unseen": …}, of which the first
        is the common one and metrics on the others have their name in front, as in "unseen_accuracy".
    client_tests: one test set per client, likewise; None for a client without. A dict may leave clients out.
    sizes: samples of every client, where asking each would be slow.
    classes: number of classes, where labels do not tell, or where reading them would be slow.
    preprocess: from raw to model inputs; floating-point data pass unchanged by default.
    columns: names of the input column (or columns) and of the target, for tables: `("image", "label")`.
    collate: makes a batch `(x, y)` from a list of samples of a map-style dataset, for samples of different lengths.
    prefetch: read the next batch in a second thread while the model trains; for data that draw nothing at random.
    name, partition: what records and reports call the data, and the way in which they are divided.
    task: what a target is: a name of `fedflat.tasks.TASKS` or a `Task` of your own; None for regression where targets
        are in floating point, else classification.
    class_names: names of the classes, for metrics per class.
    domains: the domain of every client, empty for none; test_domains: those of the test set's samples, or of every test
        set by name. With batchnorm="silobn_by_domain" a test sample is normalised by statistics of its domain.
    trusted: a small clean set of the server's own, in any of these forms, for methods such as `fltrust`.
    """

    def __init__(
        self,
        train: Sequence[Any] | Mapping[str, Any],
        test: Any = None,
        client_tests: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        sizes: Sequence[int] | np.ndarray | None = None,
        classes: int | None = None,
        preprocess: Preprocess | None = None,
        columns: Columns | None = None,
        collate: Collate | None = None,
        prefetch: bool = False,
        trusted: Any = None,
        name: str = "custom",
        partition: str = OWN,
        task: str | Task | None = None,
        class_names: Sequence[str] = (),
        domains: Sequence[str] = (),
        test_domains: Sequence[str] | Mapping[str, Sequence[str]] = (),
    ) -> None:
        self.names = [str(key) for key in train] if isinstance(train, Mapping) else None
        tests: Sequence[Any] | None = _by_name(client_tests, train)
        clients: Sequence[Any] = list(train.values()) if isinstance(train, Mapping) else train
        if isinstance(train, tuple) and len(train) == 2 and all(isinstance(part, Tensor) for part in train):
            raise InputError("train takes one entry per client; for a single client give [(x, y)]")
        if len(clients) == 0:
            raise InputError("a federation needs at least one client; train is empty")
        for what, given in (("client_tests", tests), ("sizes", sizes)):
            if given is not None and len(given) != len(clients):
                raise InputError(f"{what} has {len(given)} entries for {len(clients)} clients; give one per client")
        self.name, self.partition = name, partition
        self.preprocess = preprocess or Preprocess()
        self._form: dict[str, Any] = {"columns": columns, "collate": collate}
        self._prefetch = prefetch
        first, others = _test_sets(test)
        self.test = None if first is None else as_samples(first, "the test set", **self._form)
        self.tests = {name: as_samples(each, f"the test set {name!r}", **self._form) for name, each in others.items()}
        self.class_names, self.domains = tuple(class_names), tuple(domains)
        self._test_domains = _domains(test_domains, test)
        self._task = None if task is None else task_of(task)
        self._train, self._client_tests, self._classes = clients, tests, classes
        self.trusted = None if trusted is None else as_samples(trusted, "the trusted samples")
        self._wrapped: dict[int, Samples] = {}
        self._pool = clients if isinstance(clients, PooledClients) else None
        self._sizes = clients.sizes if sizes is None and isinstance(clients, PooledClients) else sizes

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        by: str | None = None,
        partition: Any = None,
        clients: int = 100,
        seed: int = 0,
        columns: Columns | None = None,
        test: Any = None,
        **more: Any,
    ) -> Federation:
        """Clients of a data set of Hugging Face, whose rows are read when they are asked for.

        Args:
            dataset: A `Dataset`, a dictionary of splits with "train", or a partitioner of flwr-datasets that has one.
            by: The column whose values are the clients.
            partition: A name such as "dirichlet_per_class(alpha=0.5)" for `clients` clients and this seed, or a
                partitioner of flwr-datasets.
            columns: Names of the input column (or columns) and of the target; None for the only ones possible.
            test: The common test set, or the name of a split; None for the split "test" or "validation".
            more: Further arguments of `Federation`.
        """
        return cls(**clients_of(dataset, by, partition, clients, seed, columns, test) | more)

    @classmethod
    def from_datasets(
        cls, datasets: Sequence[Any] | Mapping[str, Any], *, columns: Columns | None = None, **more: Any
    ) -> Federation:
        """One client per data set: map-style datasets of pairs, or tables; samples are read when they are asked for.

        Args:
            datasets: A list, or a dictionary by the clients' names.
            columns: Of tables; None for the only ones possible.
            more: Further arguments of `Federation`, such as test=….
        """
        held = list(datasets.values() if isinstance(datasets, Mapping) else datasets)
        if held and is_table(held[0]):
            columns = columns_of(held[0], columns)
        return cls(datasets, sizes=[len(each) for each in held], columns=columns, **more)

    def __len__(self) -> int:
        return len(self._train)

    def __repr__(self) -> str:
        return f"Federation({self.name!r}, {len(self)} client{'' if len(self) == 1 else 's'})"

    @property
    def divided(self) -> bool:
        """Whether the clients are parts of one data set, divided for the experiment, and not clients by nature."""
        return self.partition not in (OWN, "natural")

    def samples(self, client: int) -> Samples:
        """Training data of a client."""
        samples = self._own_samples(client)
        return Ahead(samples) if self._prefetch and not isinstance(samples, TensorSamples) else samples

    def _own_samples(self, client: int) -> Samples:
        if not isinstance(self._train, (list, tuple)):
            return as_samples(self._train[client], self.called(client), **self._form)
        if client not in self._wrapped:  # a list is in memory anyway, so its entries are wrapped once
            self._wrapped[client] = as_samples(self._train[client], self.called(client), **self._form)
        return self._wrapped[client]

    def pool(self) -> None:
        """Copy tensors of many small clients into one memory, so that batches of several are quick."""
        if self._pool is None and isinstance(self._train, (list, tuple)) and 1 < len(self) <= MANY:
            self._pool = pooled([self._own_samples(client) for client in range(len(self))], self.sizes)

    @property
    def pooled(self) -> PooledClients | None:
        """The clients in one memory, if that is what `samples` gives."""
        return self._pool if type(self).samples is Federation.samples else None

    def joint(self, clients: Sequence[int]) -> TensorSamples | None:
        """The training data of several clients in one memory, one after the other; None if they are not."""
        return None if self.pooled is None else self.pooled.joint(np.array(clients))

    def called(self, client: int) -> str:
        """What messages and reports call a client."""
        return f"client {client}" if self.names is None else f"client {self.names[client]}"

    def client_test(self, client: int) -> Samples | None:
        """The client's own test data; None where there are none."""
        if self._client_tests is None or self._client_tests[client] is None:
            return None
        samples = as_samples(self._client_tests[client], f"test data of {self.called(client)}", **self._form)
        return samples if len(samples) else None

    @property
    def has_client_tests(self) -> bool:
        """Whether clients have test data of their own."""
        return self._client_tests is not None

    def test_set(self, name: str = "", domain: str = "") -> Samples | None:
        """A test set by name, empty for the common one; of a domain, only its samples."""
        samples = self.tests[name] if name else self.test
        return Chosen(samples, self.domains_of(name)[domain]) if samples is not None and domain else samples

    def domains_of(self, name: str = "") -> dict[str, Tensor]:
        """Positions of a test set's samples by domain, empty for a set without domains."""
        labels = np.array(self._test_domains.get(name, ()))
        if not len(labels):
            return {"": torch.arange(len(self.test_set(name) or ()))}
        return {str(label): torch.from_numpy(np.flatnonzero(labels == label)) for label in np.unique(labels)}

    def size(self, client: int) -> int:
        """Number of training samples of a client, without asking the others."""
        return int(self.sizes_of([client])[0])

    def sizes_of(self, clients: Sequence[int]) -> np.ndarray:
        """The same for several clients, int64."""
        if isinstance(self._train if self._sizes is None else self._sizes, (list, tuple, np.ndarray)):
            return self.sizes[np.array(clients, np.int64)]  # counted once
        return np.array([len(self.samples(i)) if self._sizes is None else self._sizes[i] for i in clients], np.int64)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of training samples of every client, int64 (N,)."""
        if self._sizes is not None:
            return np.asarray(self._sizes, dtype=np.int64)
        return np.array([len(self.samples(i)) for i in range(len(self))], dtype=np.int64)

    @cached_property
    def classes(self) -> int:
        """Number of classes: as given, or the largest label seen + 1."""
        if self._classes is not None:
            return self._classes
        labels = [label for _, label in self._glances(LOOK, GLANCE)]
        labels += [] if self.test is None else [labels_of(self.test, TESTED)]
        return max((self.task.outputs(label) for label in labels), default=0)

    @cached_property
    def task(self) -> Task:
        """What a target is: as given, or by the first sample."""
        if self._task is not None:
            return self._task
        for client in range(min(len(self), GLANCE)):
            if self.size(client):
                return task_for(self.samples(client).batch(torch.zeros(1, dtype=torch.int64))[1])
        return task_of("classification")

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample."""
        for client in range(min(len(self), GLANCE)):
            if self.size(client):
                x, _ = self.samples(client).batch(torch.zeros(1, dtype=torch.int64))
                return tuple(self.preprocess(x, None).shape[1:])
        raise InputError(f"no client among the first {min(len(self), GLANCE)} holds a sample")

    def counts(self) -> np.ndarray:
        """Class-count matrix (N, C): how many samples of each class each client holds."""
        out = np.zeros((len(self), max(2, self.classes)), dtype=np.int64)
        for client in range(len(self)):
            labels = self.task.labels(labels_of(self.samples(client)))
            if labels is None:
                raise InputError(f"the targets of {self.name} are no classes, so there is nothing to count")
            held = np.bincount(labels.numpy().astype(np.int64), minlength=out.shape[1])
            out[client] = held[: out.shape[1]]
        return out

    def check(self, classes_out: int | None = None) -> None:
        """Refuse an empty client or test set, and a label beyond a model's `classes_out` outputs, naming the client.

        Work is bounded: of a lazy sequence of clients the first thousand are counted; a few samples of a few datasets
        are read.
        """
        cheap = self._sizes is not None or isinstance(self._train, (list, tuple))
        sizes = self.sizes if cheap else np.array([self.size(i) for i in range(min(len(self), GLANCE))])
        if (sizes == 0).any():
            client = int((sizes == 0).argmax())
            raise InputError(
                f"{self.called(client)} has no training samples; leave it out, or divide the data otherwise"
            )
        if self.test is not None and len(self.test) == 0:
            raise InputError("the test set is empty; give it samples, or leave it out")
        self._check_client_tests()
        if classes_out is None:
            return
        for name, labels in self._all_glances():
            if labels.is_floating_point():
                continue
            wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes_out))]
            if wrong.numel():
                raise InputError(
                    f"{name} has label {int(wrong[0])}, but the model has "
                    f"{classes_out} outputs (labels 0 … {classes_out - 1})"
                )

    def _check_client_tests(self) -> None:
        """Refuse an empty test set of a client where it was given, and tell of those that a partition made."""
        tests = self._client_tests
        if isinstance(tests, PooledClients) and (tests.sizes == 0).any():
            empty = np.flatnonzero(tests.sizes == 0)
            some = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
            log.warning(
                "no test samples fall to %d of %d clients (%s): no figure counts them", len(empty), len(self), some
            )
        given = tests if isinstance(tests, (list, tuple)) else ()
        for client, test in enumerate(given):
            if test is not None and self.client_test(client) is None:
                raise InputError(
                    f"the test set of {self.called(client)} is empty; give None for a client that has none"
                )

    def fingerprint(self) -> str:
        """A short hash of sizes, shapes, types and some of the bytes, to tell when data are others."""
        digest = hashlib.sha256(f"{len(self)} {self.preprocess}".encode())
        if self._sizes is not None:
            digest.update(np.asarray(self._sizes, dtype=np.int64).tobytes())
        for client in np.unique(np.linspace(0, len(self) - 1, 16).astype(int)).tolist():
            _digest_samples(digest, self.samples(client))
        if self.test is not None:
            _digest_samples(digest, self.test)
        return digest.hexdigest()[:16]

    def _glances(self, limit: int, lazy: int) -> Iterator[tuple[str, Tensor]]:
        """Labels of the clients, by name; a pool of tensors is first looked at as a whole.

        limit: samples that are read per client whose labels are in no tensor. lazy: how many such clients are read.
        """
        if isinstance(self._train, PooledClients) and len(self) > GLANCE:
            yield "the pool", self._train.y
            return
        count = len(self) if isinstance(self._train, (list, tuple)) else min(len(self), GLANCE)
        begun, told = time.monotonic(), 0.0
        for client in range(count):
            samples = self.samples(client)
            if not isinstance(samples, TensorSamples):
                lazy -= 1
                if lazy < 0:
                    continue
            yield self.called(client), labels_of(samples, limit)
            if (spent := time.monotonic() - begun) > told + 1:
                told = spent
                log.warning("reading labels to learn what they are, %d of %d clients so far", client + 1, count)

    def _all_glances(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._glances(FEW, FEW)
        if self.test is not None:
            yield "the test set", labels_of(self.test, FEW)


def _by_name(tests: Any, train: Any) -> Any:
    """Test sets in the order of the clients, if they are given by name."""
    if not isinstance(tests, Mapping):
        return tests
    unknown = [key for key in tests if not isinstance(train, Mapping) or key not in train]
    if unknown:
        raise InputError(f"client_tests names {unknown[0]!r}, which is no client: train must be a dict with this name")
    return [tests.get(key) for key in train]


def _test_sets(test: Any) -> tuple[Any, dict[str, Any]]:
    """The common test set, and the others by name."""
    if not isinstance(test, dict):
        return test, {}
    if not test or not all(str(name).isidentifier() for name in test):
        raise InputError(f"test sets need names such as 'unseen', letters and digits only, not {list(test)}")
    (_, first), *others = test.items()
    return first, dict(others)


def _domains(given: Sequence[str] | Mapping[str, Sequence[str]], test: Any) -> dict[str, Sequence[str]]:
    """Domains of the samples of every test set; the common one's name is empty."""
    if not isinstance(given, Mapping):
        return {"": given}
    first = next(iter(test)) if isinstance(test, dict) else ""
    return {"" if name == first else name: labels for name, labels in given.items()}


def _digest_samples(digest: Any, samples: Samples) -> None:
    """Add a few samples; of a dataset, which may draw its inputs at random, only length and labels."""
    digest.update(f"/{len(samples)}".encode())
    if len(samples) == 0:
        return
    some = torch.linspace(0, len(samples) - 1, min(4, len(samples))).long()
    # Of files no image is read: a damaged one matters in its round, not before.
    tensors = samples.batch(some) if isinstance(samples, TensorSamples) else (targets_at(samples, some),)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
