"""Averages that are evaluated but never sent; `Experiment.evaluated` names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.part import Part
from fedflat.core.rows import one
from fedflat.core.views import Local, Server


@dataclass(frozen=True)
class Selected(Part):
    """Evaluate the mean of this round's local models, `origin + combined update`."""

    def end_round(self, server: Server) -> None:
        server.state(self)["mean"] = server.origin + server.delta

    def evaluation_weights(self, server: Server) -> Tensor | None:
        return server.state(self).get("mean")


@dataclass(frozen=True)
class AllClients(Part):
    """Evaluate the mean over all N clients of each one's latest local model (the protocol of Acar et al., 2021).

    Clients that have not trained yet count with the initial model. The weights are n_i, or uniform where the method's
    are. Every client keeps its latest model (1) and sends what changed in it (1); only the simulation needs this, so it
    does not count as communication. The sum is kept in double precision because it is updated by differences.
    """

    stacks: ClassVar[bool] = True
    simulation_only: ClassVar[bool] = True

    def end(self, local: Local) -> None:
        state = local.state(self)
        weight = (1.0 if local.uniform else local.share) / local.clients
        seen = one(local.theta, 0.0 if "latest" in state else 1.0, torch.float64) * weight
        change = local.theta.double() - state["latest"].double() if "latest" in state else local.theta.double()
        local.send(self, change=change * weight, seen=seen)
        state["latest"] = local.theta.clone()

    def end_round(self, server: Server) -> None:
        state = server.state(self)
        if "initial" not in state:
            state["initial"] = server.origin.clone()
            state["sum"] = torch.zeros_like(server.origin, dtype=torch.float64)
            state["seen"] = torch.zeros(1, dtype=torch.float64)
        state["sum"] += server.total(self)["change"]
        state["seen"] += server.total(self)["seen"]

    def evaluation_weights(self, server: Server) -> Tensor | None:
        state = server.state(self)
        if "sum" not in state:
            return None
        mean = state["sum"] + (1 - state["seen"]) * state["initial"].double()
        return mean.to(server.theta.dtype)
