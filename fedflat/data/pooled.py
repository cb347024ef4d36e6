"""Clients as index sets over samples that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedflat.data.arrays import LazySamples
from fedflat.data.indices import IndexSets, Split
from fedflat.data.samples import Samples, TensorSamples, together


class PooledClients(Sequence[Samples]):
    """Clients as index sets over one pool of samples, which all of them share."""

    def __init__(self, x: Tensor | LazySamples, y: Tensor, sets: IndexSets) -> None:
        self.x, self.y, self.sets = x, y, sets

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def sizes(self) -> np.ndarray:
        """Samples of every client."""
        return self.sets.sizes

    @overload
    def __getitem__(self, client: int) -> Samples: ...
    @overload
    def __getitem__(self, client: slice) -> list[Samples]: ...
    def __getitem__(self, client: int | slice) -> Samples | list[Samples]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        indices = torch.from_numpy(self.sets.indices(client))
        return TensorSamples(self.x, self.y, indices) if isinstance(self.x, Tensor) else self.x[indices]

    def joint(self, clients: np.ndarray) -> TensorSamples | None:
        """The samples of several clients as one, one client after the other; None if they are not in memory."""
        if not isinstance(self.x, Tensor):
            return None
        sets = self.sets
        found = sets.joint(clients) if isinstance(sets, Split) else np.concatenate([sets.indices(i) for i in clients])
        return TensorSamples(self.x, self.y, torch.from_numpy(found))


MOST = 64 << 20  # bytes that are copied


def pooled(samples: Sequence[Samples], sizes: np.ndarray) -> PooledClients | None:
    """Clients whose samples are copied into one memory, so that those of several are read at once.

    None where they are not all tensors of one kind, do not have these sizes, or take too much memory.
    """
    own = [s for s in samples if isinstance(s, TensorSamples)]
    if [len(s) for s in own] != sizes.tolist() or sum(s.x.nbytes + s.y.nbytes for s in own) > MOST:
        return None
    whole = together(samples, MOST)
    if whole is None or whole.indices is not None:
        return None
    offsets = np.cumsum([0, *map(len, samples)])
    return PooledClients(whole.x, whole.y, Split(np.arange(offsets[-1]), offsets))
