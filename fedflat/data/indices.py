"""Who holds which sample of a pool: the result of a partition, without a Python object a client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedflat.core.streams import numpy_stream


class IndexSets(Protocol):
    """One array of positions in the pool a client."""

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> np.ndarray:
        """Samples of every client, int64 (N,)."""
        ...

    def indices(self, client: int) -> np.ndarray:
        """Positions in the pool that this client holds."""
        ...


@dataclass(frozen=True)
class Split:
    """Disjoint index sets in one flat array; client i holds `flat[offsets[i]:offsets[i + 1]]`."""

    flat: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lists: Iterable[np.ndarray]) -> Split:
        """Pack one array per client.

        >>> Split.of([np.array([4, 2]), np.array([7])]).sizes
        array([2, 1])
        """
        parts = [np.asarray(part, dtype=np.int64) for part in lists]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(np.concatenate(parts) if parts else np.empty(0, np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Samples of every client."""
        return np.diff(self.offsets)

    def indices(self, client: int) -> np.ndarray:
        """Positions in the pool that this client holds."""
        return self.flat[self.offsets[client] : self.offsets[client + 1]]

    def joint(self, clients: np.ndarray) -> np.ndarray:
        """The positions of several clients, one after the other."""
        starts, sizes = self.offsets[clients], self.offsets[clients + 1] - self.offsets[clients]
        found: np.ndarray = self.flat[np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)]
        return found


@dataclass(frozen=True)
class Resample:
    """Virtual clients: each draws `size` positions of a pool of `total` by its own stream, when asked.

    Nothing is stored, so a million clients cost no memory. Clients share samples; one client holds none
    twice.
    """

    clients: int
    size: int
    total: int
    seed: int

    def __len__(self) -> int:
        return self.clients

    @property
    def sizes(self) -> np.ndarray:
        """`size` for every client, as a view of one number."""
        return np.broadcast_to(np.int64(self.size), (self.clients,))

    def indices(self, client: int) -> np.ndarray:
        """Positions in the pool that this client holds."""
        return numpy_stream(self.seed, "resample", client).choice(self.total, self.size, replace=False)


@dataclass(frozen=True)
class Holdout:
    """One side of a split of every client of `base`: shuffled, the last `fraction` is the test side.

    Computed when asked, so that it costs virtual clients nothing either.
    """

    base: IndexSets
    fraction: float
    seed: int
    test: bool

    def __len__(self) -> int:
        return len(self.base)

    @property
    def sizes(self) -> np.ndarray:
        """Samples on this side of every client."""
        held = self._held(self.base.sizes)
        return held if self.test else self.base.sizes - held

    def _held(self, sizes: np.ndarray) -> np.ndarray:
        # The small term keeps 0.1 · 500 at 50 whatever the rounding of 0.1.
        return np.floor(sizes * self.fraction + 1e-9).astype(np.int64)

    def indices(self, client: int) -> np.ndarray:
        """Positions in the pool on this side of the client."""
        every = self.base.indices(client)
        shuffled = every[numpy_stream(self.seed, "holdout", client).permutation(len(every))]
        cut = len(every) - int(self._held(np.array(len(every))))
        return shuffled[cut:] if self.test else shuffled[:cut]


def matching_tests(sets: Split, labels: np.ndarray, test_labels: np.ndarray, seed: int) -> Split:
    """A test set for every client: the common one divided class by class in proportion to what each client holds.

    Disjoint; together they are all test samples of the classes that any client holds. Shuffled by the seed.
    """
    classes = 1 + max(int(labels.max(initial=0)), int(test_labels.max(initial=0)))
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    order = numpy_stream(seed, "client_tests").permutation(len(test_labels))
    found: list[list[np.ndarray]] = [[] for _ in range(len(sets))]
    for label in range(classes):
        held = np.bincount(owner[labels[sets.flat] == label], minlength=len(sets))
        if held.sum():
            tests = order[test_labels[order] == label]
            for client, part in enumerate(np.split(tests, np.cumsum(held)[:-1] * len(tests) // held.sum())):
                found[client].append(part)
    return Split.of([np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in found])
