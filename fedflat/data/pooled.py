"""Clients as index sets over samples that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedflat.data.arrays import LazySamples
from fedflat.data.indices import IndexSets
from fedflat.data.samples import Samples, TensorSamples


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
