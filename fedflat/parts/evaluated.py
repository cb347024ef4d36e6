"""Averages that are only evaluated, never sent: what `Experiment.evaluated` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.method import Local, Part, Server


@dataclass(frozen=True)
class Selected(Part):
    """Evaluate the mean of this round's local models, `origin + combined update`."""

    def conclude(self, server: Server) -> None:
        """Remember the mean."""
        server.state(self)["mean"] = server.origin + server.delta

    def averaged(self, server: Server) -> Tensor | None:
        """The mean of the last round."""
        return server.state(self).get("mean")


@dataclass(frozen=True)
class AllClients(Part):
    """Evaluate the mean over all N clients of each one's latest local model (the protocol of Acar et al., 2021).

    Clients never heard count with the initial model. Weights n_i, or uniform where the method is. Every client keeps
    its latest model (1) and sends what changed in it (1): this is bookkeeping of a simulation, not communication.
    The sum is kept in double precision because it is updated by differences.
    """

    bookkeeping: ClassVar[bool] = True

    def end(self, local: Local) -> None:
        """Send how much this client's share of the sum has changed."""
        state = local.state(self)
        weight = (1.0 if local.uniform else local.share) / local.clients
        seen = 0.0 if "latest" in state else weight
        change = local.theta.double() - state["latest"].double() if "latest" in state else local.theta.double()
        local.send(self, change=change * weight, seen=torch.tensor([seen], dtype=torch.float64))
        state["latest"] = local.theta.clone()

    def conclude(self, server: Server) -> None:
        """Bring the sum up to date."""
        state = server.state(self)
        if "initial" not in state:
            state["initial"] = server.origin.clone()
            state["sum"] = torch.zeros_like(server.origin, dtype=torch.float64)
            state["seen"] = torch.zeros(1, dtype=torch.float64)
        state["sum"] += server.total(self)["change"]
        state["seen"] += server.total(self)["seen"]

    def averaged(self, server: Server) -> Tensor | None:
        """The mean over all clients."""
        state = server.state(self)
        if "sum" not in state:
            return None
        mean = state["sum"] + (1 - state["seen"]) * state["initial"].double()
        return mean.to(server.theta.dtype)
