"""The data of several clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from fedflat.core.samples import Samples
from fedflat.data.federation import Federation
from fedflat.data.samples import TensorSamples, together


class Several(Sequence[Samples]):
    """The training data of several clients. Those in one memory are not looked up one by one unless somebody asks.

    Attributes:
        sizes: The clients' numbers of samples.
    """

    def __init__(self, federation: Federation, clients: Sequence[int]) -> None:
        self._federation, self._clients = federation, clients
        self._read: dict[int, Samples] = {}
        pooled = federation.pooled is not None
        self.sizes: list[int] = federation.sizes_of(clients).tolist() if pooled else list(map(len, self))

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, place: int) -> Samples: ...
    @overload
    def __getitem__(self, place: slice) -> list[Samples]: ...
    def __getitem__(self, place: int | slice) -> Samples | list[Samples]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        client = self._clients[place]
        if client not in self._read:  # data on a disk are opened once
            self._read[client] = self._federation.samples(client)
        return self._read[client]

    def joint(self, most: int) -> TensorSamples | None:
        """All samples as one, as `together` gives them; those in one memory without a copy."""
        made = self._federation.joint(self._clients)
        return together(list(self), most) if made is None else made
