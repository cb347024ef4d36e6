"""Momentum that lasts: what the code of FedAlign (Mendieta et al., 2022) does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.method import Local, Part


@dataclass(frozen=True)
class KeepMomentum(Part):
    """Let a client's momentum buffer survive from round to round instead of starting at zero.

    Client keeps the buffer (1); sends 1 down, 1 up.
    """

    name: ClassVar[str] = "keep_momentum"
    formula: ClassVar[str] = "a round starts with v ← v at the end of the client's last one,  not with v ← 0"

    def begin(self, local: Local) -> None:
        """Hand the old buffer to the optimiser."""
        velocity = local.state(self).get("velocity")
        local.velocity = None if velocity is None else velocity.clone()

    def end(self, local: Local) -> None:
        """Keep the new one."""
        if local.velocity is not None:
            local.state(self)["velocity"] = local.velocity.clone()
