"""Client drift in a round: formulas on the clients' updates Δ_m and weights w_m, as vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedflat.core.devices import hosted, on
from fedflat.errors import InputError


def drift_diversity(deltas: Tensor | Sequence[Tensor], weights: Sequence[float] | None = None) -> float:
    """Σ p_m‖Δ_m‖² / ‖Σ p_mΔ_m‖²: at least 1, and 1 only if all updates are equal; inf if they cancel.

    Differs from the paper in that both sums are over the same round.

    Args:
        deltas: One update per client.
        weights: p_m, scaled to sum to one; None is uniform.
    """
    rows, p = _weighted(deltas, weights)
    together = float((p @ rows).square().sum())
    apart = float(p @ rows.square().sum(1))
    return apart / together if together else float("inf") if apart else float("nan")


def client_consistency(
    deltas: Tensor | Sequence[Tensor], weights: Sequence[float] | None = None, *, centred: bool = False
) -> float:
    """Σ p_m‖Δ_m‖²; with `centred` Σ p_m‖Δ_m − Δ̄‖², which is smaller by ‖Δ̄‖²."""
    rows, p = _weighted(deltas, weights)
    if centred:
        rows = rows - p @ rows
    return float(p @ rows.square().sum(1))


def weight_cosines(clients: Tensor | Sequence[Tensor], server: Tensor) -> Tensor:
    """Cosine of the angle between each client's weights and the server's."""
    rows = _rows(clients)
    reference = on(server.detach().double().reshape(-1), rows.device)
    if rows.shape[1] != len(reference):
        raise InputError(f"the clients have {rows.shape[1]} weights, the server {len(reference)}")
    return hosted(torch.div(rows @ reference, rows.norm(dim=1) * reference.norm()))


def weight_norms(clients: Tensor | Sequence[Tensor]) -> Tensor:
    """Norm of each client's weights."""
    return hosted(torch.sqrt(_rows(clients).square().sum(1)))


def _rows(vectors: Tensor | Sequence[Tensor]) -> Tensor:
    if len(vectors) == 0:
        raise InputError("at least one client is needed")
    if not isinstance(vectors, Tensor):
        vectors = [on(vector.reshape(-1), vectors[0].device) for vector in vectors]
        if len({len(vector) for vector in vectors}) > 1:
            raise InputError("the clients' vectors must all be of one length")
        vectors = torch.stack(vectors)
    if vectors.dim() != 2:
        raise InputError(f"one vector per client is needed, got a tensor of shape {tuple(vectors.shape)}")
    return vectors.detach().double()


def _weighted(vectors: Tensor | Sequence[Tensor], weights: Sequence[float] | None) -> tuple[Tensor, Tensor]:
    rows = _rows(vectors)
    p = torch.ones(len(rows), dtype=torch.float64) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    if len(p) != len(rows) or not bool((p >= 0).all()) or float(p.sum()) <= 0:
        raise InputError(f"{len(rows)} weights that are not negative and not all zero are needed")
    return rows, on(p / p.sum(), rows.device)
