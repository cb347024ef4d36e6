"""The versions of many clients' states, stored compactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np


class Versions(MutableMapping[int, int]):
    """Client → round (from 1) that produced its state, in four bytes per client, as there may be millions of clients.

    >>> versions = Versions({7: 3, 900_000: 5})
    >>> versions[900_000], 8 in versions, len(versions)
    (5, False, 2)
    """

    def __init__(self, rounds: Mapping[int, int] | None = None) -> None:
        self._rounds = np.zeros(0, dtype=np.int32)  # 0: no state
        self.update(rounds or {})

    def __getitem__(self, client: int) -> int:
        round = int(self._rounds[client]) if client < len(self._rounds) else 0
        if not round:
            raise KeyError(client)
        return round

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and client < len(self._rounds) and bool(self._rounds[client])

    def __setitem__(self, client: int, round: int) -> None:
        size = len(self._rounds)
        if client >= size:  # grow by at least an eighth, so that copies are rare
            self._rounds = np.concatenate([self._rounds, np.zeros(max(client + 1 - size, size // 8), dtype=np.int32)])
        self._rounds[client] = round

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._rounds[client] = 0

    def __iter__(self) -> Iterator[int]:
        return map(int, np.flatnonzero(self._rounds))

    def __len__(self) -> int:
        return int(np.count_nonzero(self._rounds))

    def copy(self) -> Versions:
        """An independent copy."""
        twin = Versions()
        twin._rounds = self._rounds.copy()
        return twin

    def unlike(self, other: Versions) -> list[tuple[int, int]]:
        """The (client, round) pairs that `other` does not have."""
        differs = self._rounds != 0
        both = min(len(self._rounds), len(other._rounds))
        differs[:both] &= self._rounds[:both] != other._rounds[:both]
        clients = np.flatnonzero(differs)
        return list(zip(clients.tolist(), self._rounds[clients].tolist(), strict=True))
