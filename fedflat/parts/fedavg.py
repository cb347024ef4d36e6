"""FedAvg: the base that fills no slot."""

from __future__ import annotations

from dataclasses import dataclass

from fedflat.method import Part


@dataclass(frozen=True)
class FedAvg(Part):
    """Train locally, average the results weighted by sample counts (McMahan et al., 2017).

    w ← w + server_lr · Σ_S n_i (y_i − w) / Σ_S n_i

    Keeps nothing; sends 1 model down, 1 up. It changes nothing in either loop, so adding it to a sum has no effect.
    """
