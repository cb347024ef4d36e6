"""The data of several clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from fedflat.core.samples import Samples
from fedflat.data.federation import Federation
from fedflat.data.samples import TensorSamples


class Several(Sequence[Samples]):
    """The training data of several clients. Those of a single one are looked up when somebody asks for them.

    Attributes:
        sizes: The clients' numbers of samples.
    """

    def __init__(self, federation: Federation, clients: Sequence[int]) -> None:
        self._federation, self._clients = federation, clients
        self.sizes: list[int] = federation.sizes_of(clients).tolist()

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, place: int) -> Samples: ...
    @overload
    def __getitem__(self, place: slice) -> list[Samples]: ...
    def __getitem__(self, place: int | slice) -> Samples | list[Samples]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return self._federation.samples(self._clients[place])

    def joint(self, most: int) -> TensorSamples | None:
        """All samples as one, see `Federation.joint`."""
        return self._federation.joint(self._clients, most)
