"""FedAvg, the base method, which fills no slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat.core.part import Part


@dataclass(frozen=True)
class FedAvg(Part):
    """Train locally, average the results weighted by sample counts (McMahan et al., 2017).

    Keeps nothing; sends 1 model down, 1 up. It changes nothing in either loop, so adding it to a method has no effect.
    """

    formula: ClassVar[str] = "w ← w + η_g Σ_S n_i Δ_i / Σ_S n_i,  Δ_i = y_i − w"

    def idle_rounds(self, rounds: int) -> int:
        return rounds
