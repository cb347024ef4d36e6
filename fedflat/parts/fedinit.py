"""FedInit (Sun, Shen and Tao, 2023)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.participation import sampling
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.direction import require_one_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedInit(Part):
    """Start away from where the client ended last time, to undo its drift.

    y_last is the client's last local model; a client that takes part for the first time starts at w. Pulls of other
    parts are towards w, and the update is y_i − w. The client keeps y_last (1); sends 1 down, 1 up.
    If clients join rarely, keep β (N/|S| − 1) below 1: the server takes over β times the moves that they missed.

    Args:
        beta: β, how far to start from w; 0 is FedAvg.
        variant: "paper" for the formula. "code": a newcomer's y_last is the first model of the run, which is sent
            along (2 down); updates and pulls are measured from w_0.
    """

    formula: ClassVar[str] = "w_0 = w + β (w − y_last)"
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = -10  # other parts begin where this one starts
    beta: NonNegative = 0.1
    variant: Literal["paper", "code"] = "paper"

    def check(self, setup: SetupView) -> None:
        law, value = sampling(setup.experiment.participation)
        share = {"bernoulli": value, "uniform": value / setup.clients}.get(law) if setup.sampled else None
        if self.variant == "code":
            require_one_model(setup, self)
            mean = setup.evaluator is not None and setup.evaluator.name == "selected"
            self.require(not mean, "updates from starts of their own tell no mean: leave out evaluated='selected'")
        elif share and self.beta * (1 / share - 1) > 1:
            log.warning(
                "fedinit: between two of its rounds a client waits for about %.3g others; beta=%g times that is above "
                "1, and where the loss is flat the model then runs away. Take beta < %.2g, or variant='code'",
                *(1 / share - 1, self.beta, 1 / (1 / share - 1)),
            )

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"first": server.state(self).get("first", server.origin)} if self.variant == "code" else {}

    def begin(self, local: Local) -> None:
        last = local.state(self).get("last", local.received(self).get("first"))
        if last is None or self.beta == 0:
            return
        local.theta.add_(local.given - last, alpha=self.beta)
        if self.variant == "code":
            local.origin = local.theta.clone()

    def end(self, local: Local) -> None:
        local.state(self)["last"] = local.theta.clone()

    def end_round(self, server: Server) -> None:
        if self.variant == "code":
            server.state(self).setdefault("first", server.origin.clone())
