"""The server's own client: it trains on a small clean set, for methods that compare updates with its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.samples import Samples
from fedflat.data import Federation
from fedflat.data.samples import TensorSamples
from fedflat.engine.jobs import train
from fedflat.engine.setup import Broadcast, Job, Setup
from fedflat.errors import InputError


class TrustedClient:
    """Trains as a client of its own, whose number is one beyond all others."""

    def __init__(self, setup: Setup, wanted: int) -> None:
        given, self._number = setup.federation.trusted, len(setup.federation)
        samples = given if given is not None else drawn(setup, wanted)
        clients = [samples] * (self._number + 1)
        own = Federation(clients, sizes=[len(samples)] * len(clients), preprocess=setup.federation.preprocess)
        self._stage = replace(setup, federation=own)

    def update(self, broadcast: Broadcast) -> Tensor:
        """The server's own update of the weights that are sent."""
        made = train(self._stage, broadcast, Job(self._number, "train"))
        if made.failure is not None:
            raise InputError(f"training on the server's own samples failed: {made.failure}")
        return made.delta


def drawn(setup: Setup, wanted: int) -> Samples:
    """Samples of the clients' data, drawn at random without replacement: only a simulation can do that."""
    if setup.deployed:
        raise InputError("the server needs clean samples of its own: give server_app(…, trusted=(x, y))")
    federation, edges = setup.federation, np.cumsum(setup.federation.sizes[: setup.clients])
    stream = streams.numpy_stream(setup.experiment.seed, "trusted")
    chosen = np.sort(stream.choice(edges[-1], min(wanted, int(edges[-1])), replace=False))
    holders = np.searchsorted(edges, chosen, side="right")
    found = []
    for client in np.unique(holders):
        first = 0 if client == 0 else edges[client - 1]
        found.append(federation.samples(int(client)).batch(torch.from_numpy(chosen[holders == client] - first)))
    return TensorSamples(torch.cat([x for x, _ in found]), torch.cat([y for _, y in found]))
