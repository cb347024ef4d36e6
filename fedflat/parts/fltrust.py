"""FLTrust (Cao et al., 2021)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import Count
from fedflat.core.part import Part
from fedflat.core.rows import dots, norms, unit
from fedflat.core.sums import TreeSum
from fedflat.core.views import Server, Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FLTrust(Part):
    """Trust an update as far as it points where the server's own one does, and give all of them its length.

    The server trains on a small clean set of its own in every round, like a client: `Federation(trusted=…)`. Needs no
    number of attackers, and holds against a majority of them. Keeps nothing; sends 1 down, 1 up.

    Args:
        samples: Where a simulation has no such set, so many samples of the clients' clean data, drawn at random.
    """

    formula: ClassVar[str] = (
        "Δ̄ = Σ_S t_i ‖Δ_0‖ Δ_i/‖Δ_i‖ / Σ_S t_i,  t_i = max(0, cos(Δ_i, Δ_0)),  Δ_0 the update of the server's own data"
    )
    uniform: ClassVar[bool] = True
    samples: Count = 100

    @property
    def robust(self) -> str:
        return "update"

    @property
    def trusted_samples(self) -> int:
        return self.samples

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        own, total, trust = server.trusted, TreeSum[Tensor](), 0.0
        length = float(norms(own))
        for update in updates:
            direction = unit(update.delta)
            score = max(0.0, float(dots(direction, unit(own))))
            total.add(direction * (score * length))
            trust += score
        if trust == 0:
            log.warning("round %d: fltrust trusts no update, and takes the server's own", server.round)
            return own.clone()
        return total.result().div_(trust)
