"""Momentum that clients keep between rounds, as in the code of FedAlign (Mendieta et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.core.part import Part
from fedflat.core.views import Local


@dataclass(frozen=True)
class KeepMomentum(Part):
    """Keep a client's momentum buffer from round to round instead of starting every round at zero.

    The client keeps the buffer (1); sends 1 down, 1 up.
    """

    name: ClassVar[str] = "keep_momentum"
    stacks: ClassVar[bool] = True
    formula: ClassVar[str] = "a round starts with v ← v at the end of the client's last one,  not with v ← 0"

    def begin(self, local: Local) -> None:
        velocity = local.state(self).get("velocity")
        local.velocity = None if velocity is None else velocity.clone()

    def end(self, local: Local) -> None:
        if local.velocity is not None:
            local.state(self)["velocity"] = local.velocity.clone()
