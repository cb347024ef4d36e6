"""The state of the optimiser that clients keep between rounds, as in the code of FedAlign (Mendieta et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.core.part import Part
from fedflat.core.views import Local


@dataclass(frozen=True)
class KeepMomentum(Part):
    """Keep the state of a client's optimiser from round to round instead of starting every round afresh.

    With `sgd` that is the momentum, with `adam` both means and the number of steps, and so on.
    The client keeps the state (1 with `sgd`, 2 with `adam`); sends 1 down, 1 up.
    """

    name: ClassVar[str] = "keep_momentum"
    stacks: ClassVar[bool] = True
    formula: ClassVar[str] = "a round starts with v ← v at the end of the client's last one,  not with v ← 0"

    def begin(self, local: Local) -> None:
        kept = local.state(self)
        local.optimizer_state = {name: tensor.clone() for name, tensor in kept.items()} or None

    def end(self, local: Local) -> None:
        local.state(self).update({name: tensor.clone() for name, tensor in (local.optimizer_state or {}).items()})
