"""Keep the server sound: what it was before a round, and what must hold before a round replaces it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedflat.core.tensors import copied
from fedflat.core.views import Server
from fedflat.errors import RoundLostError


class Snapshot:
    """The server's weights, statistics and states, to which a bad round goes back."""

    def __init__(self, server: Server) -> None:
        self._server, self._states = server, copied(server.states)
        self._vectors = server.theta.clone(), server.buffers.clone(), server.counters.clone(), server.delta

    def restore(self) -> None:
        """Undo what has happened to the server since."""
        server = self._server
        server.theta, server.buffers, server.counters, server.delta = self._vectors
        server.states, server.totals, server.participants = self._states, {}, 0


def check_sound(server: Server) -> None:
    """Refuse weights or states that are not finite after the server's step; the last checkpoint is older."""
    states = ((f"the {name!r} of {part}", t) for part, state in server.states.items() for name, t in state.items())
    _refuse_infinite(server.round, [("the server's weights", server.theta)])
    _refuse_infinite(server.round, states)


def _refuse_infinite(round: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for what, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RoundLostError(
                f"round {round}: {what} are not finite after its step. A smaller server_lr or lr may help"
            )


def suspect(rows: Sequence[dict[str, object]]) -> str:
    """The client that most likely spoilt a round: that with the longest update."""
    known = [row for row in rows if math.isfinite(float(str(row["update_norm"])))]
    if not known:
        return "Nobody can be suspected: only the sum of the updates is known"
    longest = max(known, key=lambda row: float(str(row["update_norm"])))
    return (
        f"client {longest['client']} is suspected: its update is the longest, with a norm of {longest['update_norm']}"
    )
