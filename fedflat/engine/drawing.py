"""Who trains in a round, and what the server remembers of who did."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from fedflat.core.participation import looks_at_losses
from fedflat.core.tensors import State
from fedflat.core.views import Server

SEEN = "seen"
"""The server's state with the clients that have returned an update."""
LOSSES = "last_losses"
"""The server's state with every client's last training loss, if the law of participation asks for it."""


class Drawing:
    """Draws participants with a function of t, or of t and the last losses, and remembers what later draws need.

    Args:
        choose: The function.
        server: Its states hold what is remembered, so that a run that is resumed draws the same.
        keep: Whether to remember who has returned an update.
    """

    def __init__(self, choose: Callable[..., Iterable[int]], server: Server, keep: bool) -> None:
        self._choose, self._server, self._keep = choose, server, keep
        self._looks = looks_at_losses(choose)

    def __call__(self) -> list[int]:
        """The participants of the next round."""
        if not self._looks:
            return list(self._choose(self._server.round))
        known = self._known()
        return list(self._choose(self._server.round, known["loss"].masked_fill(~known["known"], torch.inf)))

    def seen(self) -> Tensor:
        """Which clients have returned an update, where that is remembered."""
        fresh = torch.zeros(self._server.clients, dtype=torch.bool)
        return self._server.states.get(SEEN, {}).get("clients", fresh)

    def _known(self) -> State:
        """The last losses, and which clients have one."""
        count = self._server.clients
        fresh = {"loss": torch.zeros(count, dtype=torch.float64), "known": torch.zeros(count, dtype=torch.bool)}
        return self._server.states.get(LOSSES, fresh)

    def remember(self, numbers: np.ndarray) -> None:
        """Take note of the updates of a round, by their records of `core.updates.NUMBERS`."""
        if self._keep:
            seen = self._server.states.setdefault(SEEN, {"clients": self.seen()})["clients"]
            seen[torch.from_numpy(numbers["client"])] = True
        if self._looks:
            last = numbers[np.isfinite(numbers["loss"])]
            state, clients = self._server.states.setdefault(LOSSES, self._known()), torch.from_numpy(last["client"])
            state["loss"][clients] = torch.from_numpy(last["loss"])
            state["known"][clients] = True
