"""Rounds of many clients in little memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np


class Rounds(MutableMapping[int, int]):
    """Client → round (from 1), as a dictionary of four bytes a client: there may be millions.

    >>> rounds = Rounds({7: 3, 900_000: 5})
    >>> rounds[900_000], 8 in rounds, len(rounds)
    (5, False, 2)
    """

    def __init__(self, rounds: Mapping[int, int] | None = None) -> None:
        self._rounds = np.zeros(0, dtype=np.int32)  # 0 where there is none
        self.update(rounds or {})

    def __getitem__(self, client: int) -> int:
        round = int(self._rounds[client]) if client < len(self._rounds) else 0
        if not round:
            raise KeyError(client)
        return round

    def __setitem__(self, client: int, round: int) -> None:
        size = len(self._rounds)
        if client >= size:  # by a part of the size at least, so that this is rare
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

    def copy(self) -> Rounds:
        """The same again."""
        twin = Rounds()
        twin._rounds = self._rounds.copy()
        return twin

    def unlike(self, other: Rounds) -> list[tuple[int, int]]:
        """Those of which `other` says something else, or nothing."""
        differs = self._rounds != 0
        both = min(len(self._rounds), len(other._rounds))
        differs[:both] &= self._rounds[:both] != other._rounds[:both]
        clients = np.flatnonzero(differs)
        return list(zip(clients.tolist(), self._rounds[clients].tolist(), strict=True))
