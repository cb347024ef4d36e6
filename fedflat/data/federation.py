"""The data of a federation: who holds what, the common test set, and how raw samples become model inputs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.data.indices import PooledClients
from fedflat.data.preprocess import Preprocess
from fedflat.data.samples import LOOK, DatasetSamples, Samples, TensorSamples, as_samples, labels_of
from fedflat.errors import InputError

__all__ = ["DatasetSamples", "Federation", "Samples", "TensorSamples"]

log = logging.getLogger(__name__)
GLANCE = 1000  # clients of a lazy sequence that are looked at where looking at all could take for ever
IGNORED = -100  # the target that PyTorch's cross-entropy leaves out


class Federation:
    """Clients' data in any form.

    train: one entry a client: a pair `(x, y)` of tensors, a map-style dataset of such pairs, or `Samples`.
        Only `len()` and `[i]` are used, so a lazy sequence may hold a million clients.
    test: the common test set, in any of these forms.
    client_tests: one test set a client, likewise; None for a client without.
    sizes: samples of every client, where asking each would be slow.
    classes: number of classes, where labels do not tell.
    preprocess: from raw to model inputs; floating-point data pass unchanged by default.
    """

    def __init__(
        self,
        train: Sequence[Any],
        test: Any = None,
        client_tests: Sequence[Any] | None = None,
        *,
        sizes: Sequence[int] | np.ndarray | None = None,
        classes: int | None = None,
        preprocess: Preprocess | None = None,
        name: str = "custom",
    ) -> None:
        if isinstance(train, tuple) and len(train) == 2 and all(isinstance(part, Tensor) for part in train):
            raise InputError("train takes one entry a client; for a single client give [(x, y)]")
        if len(train) == 0:
            raise InputError("a federation needs at least one client; train is empty")
        for what, given in (("client_tests", client_tests), ("sizes", sizes)):
            if given is not None and len(given) != len(train):
                raise InputError(f"{what} has {len(given)} entries for {len(train)} clients; give one a client")
        self.name = name
        self.preprocess = preprocess or Preprocess()
        self.test = None if test is None else as_samples(test, "the test set")
        self._train, self._client_tests, self._classes = train, client_tests, classes
        self._sizes = train.sizes if sizes is None and isinstance(train, PooledClients) else sizes

    def __len__(self) -> int:
        return len(self._train)

    def __repr__(self) -> str:
        return f"Federation({self.name!r}, {len(self)} clients)"

    def samples(self, client: int) -> Samples:
        """Training data of a client."""
        return as_samples(self._train[client], f"client {client}")

    def client_test(self, client: int) -> Samples | None:
        """The client's own test data; None where there are none."""
        if self._client_tests is None or self._client_tests[client] is None:
            return None
        samples = as_samples(self._client_tests[client], f"test data of client {client}")
        return samples if len(samples) else None

    @property
    def has_client_tests(self) -> bool:
        """Whether clients have test data of their own."""
        return self._client_tests is not None

    def size(self, client: int) -> int:
        """Number of training samples of a client, without asking the others."""
        return len(self.samples(client)) if self._sizes is None else int(self._sizes[client])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of training samples of every client, int64 (N,)."""
        if self._sizes is not None:
            return np.asarray(self._sizes, dtype=np.int64)
        return np.array([self.size(i) for i in range(len(self))], dtype=np.int64)

    @cached_property
    def classes(self) -> int:
        """Number of classes: as given, or the largest label seen + 1."""
        if self._classes is not None:
            return self._classes
        labels = [label for _, label in self._glances()] + ([] if self.test is None else [labels_of(self.test)])
        if any(label.is_floating_point() for label in labels):
            raise InputError(
                "targets are not integers, so the number of classes is unknown; give Federation(classes=…)"
            )
        return 1 + max((int(label.max()) for label in labels if label.numel()), default=-1)

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
        out = np.zeros((len(self), self.classes), dtype=np.int64)
        for client in range(len(self)):
            labels = labels_of(self.samples(client)).reshape(-1)
            labels = labels[labels != IGNORED]
            out[client] = np.bincount(labels.numpy().astype(np.int64), minlength=self.classes)[: self.classes]
        return out

    def check(self, classes_out: int | None = None) -> None:
        """Refuse an empty client or test set, and a label beyond a model's `classes_out` outputs, naming the client.

        Work is bounded: of a lazy sequence of clients the first thousand are read, of a map-style dataset
        some samples.
        """
        cheap = self._sizes is not None or isinstance(self._train, (list, tuple))
        sizes = self.sizes if cheap else np.array([self.size(i) for i in range(min(len(self), GLANCE))])
        if (sizes == 0).any():
            client = int((sizes == 0).argmax())
            raise InputError(f"client {client} has no training samples; leave it out, or divide the data otherwise")
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
                raise InputError(f"the test set of client {client} is empty; give None for a client that has none")

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

    def _glances(self) -> Iterable[tuple[str, Tensor]]:
        """Labels of the clients, by name; a pool of tensors is first looked at as a whole."""
        if isinstance(self._train, PooledClients) and len(self) > GLANCE:
            yield "the pool", self._train.y
            return
        for client in range(len(self) if isinstance(self._train, (list, tuple)) else min(len(self), GLANCE)):
            yield f"client {client}", labels_of(self.samples(client), LOOK)

    def _all_glances(self) -> Iterable[tuple[str, Tensor]]:
        yield from self._glances()
        if self.test is not None:
            yield "the test set", labels_of(self.test, LOOK)


def _digest_samples(digest: Any, samples: Samples) -> None:
    """Add a few samples; of a dataset, which may draw its inputs at random, only length and labels."""
    digest.update(f"/{len(samples)}".encode())
    if len(samples) == 0:
        return
    x, y = samples.batch(torch.linspace(0, len(samples) - 1, min(4, len(samples))).long())
    for tensor in (x, y) if isinstance(samples, TensorSamples) else (y,):
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
