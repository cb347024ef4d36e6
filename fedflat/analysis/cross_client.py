"""How much the curvature differs between clients: H_N and H_D of FedAlign (eqs. 3–4 of its paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.batches import read
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.problem import Conditions, Options, Problem, Protocol, opened
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError, UnknownNameError

DIAGONALS = ("element", "tensor_trace")
PAIRS = ("distinct", "all")
ON = ("client", "global")


@dataclass(frozen=True, eq=False)
class CrossClient:
    """H_N and H_D of the clients' Hessian diagonals q_k.

    Attributes:
        norm: H_N, the mean squared difference of the norms ‖q_k‖ of two clients.
        direction: H_D, the mean cosine between two clients' q_k.
        conditions: One entry per client.
        diagonals: q_k, one row per client.
    """

    norm: float
    direction: float
    conditions: tuple[Conditions, ...]
    diagonals: Tensor = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self)


def cross_client(
    models: Sequence[nn.Module | FlatModel],
    data: Sequence[Any],
    *,
    diagonal: str = "element",
    pairs: str = "distinct",
    on: str = "client",
    probes: int = 100,
    **options: Unpack[Options],
) -> CrossClient:
    """Compare the clients' Hessians by their diagonals, estimated with the same probes for all.

    Args:
        data: One data set per model.
        diagonal: "element", as in the paper's equations, or "tensor_trace", one number per tensor, as in its code.
        pairs: "distinct" clients, or "all", which also pairs each client with itself, as in the code.
        on: "client" evaluates each model on its own data, "global" evaluates every model on all data.
        probes: Number of random probes per diagonal.
    """
    for kind, name, known in (("diagonal", diagonal, DIAGONALS), ("pairs", pairs, PAIRS), ("data choice", on, ON)):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    if len(models) != len(data) or len(models) < 2:
        raise InputError(f"two models or more and one data set each are needed, got {len(models)} and {len(data)}")
    union = [batch for each in data for batch in read(each)] if on == "global" else None
    rows, conditions = [], []
    for model, own in zip(models, data, strict=True):
        with opened(model, union or own, Protocol.of(options)) as problem:
            rows.append(_diagonal(problem, diagonal, probes))
            conditions.append(problem.conditions())
    if len({len(row) for row in rows}) > 1:
        raise InputError("models of one architecture are needed")
    q = torch.stack(rows)  # on the CPU, wherever each model is
    return CrossClient(*compare_diagonals(q, pairs), tuple(conditions), q)


def _diagonal(problem: Problem, kind: str, probes: int) -> Tensor:
    protocol, like = problem.protocol, problem.flat.theta
    with Hessian(problem) as hessian:
        announce(protocol.progress, "diagonal", probes, hessian.seconds)
        with tracked(protocol.progress, "diagonal", probes) as hessian.step:
            found = hutchinson(hessian, like, probes=probes, diagonal=True, seed=protocol.seed).diagonal
    assert found is not None  # diagonal=True
    if kind == "element":
        return found
    return torch.stack([span.of(found).sum() for span in problem.flat.spans])


def compare_diagonals(q: Tensor, pairs: str = "distinct") -> tuple[float, float]:
    """H_N and H_D of diagonals q, one row per client. Identical rows give 0 and 1."""
    if pairs not in PAIRS:
        raise UnknownNameError("pairs", pairs, PAIRS)
    if q.dim() != 2 or len(q) < 2:
        raise InputError(f"two rows or more are needed, one per client, got shape {tuple(q.shape)}")
    norms = q.norm(dim=1)
    apart = (norms[:, None] - norms[None, :]) ** 2
    cosine = (q @ q.T) / (norms[:, None] * norms[None, :])
    chosen = (
        torch.ones_like(apart, dtype=torch.bool)
        if pairs == "all"
        else ~torch.eye(len(q), dtype=torch.bool, device=q.device)
    )
    return float(apart[chosen].mean()), float(cosine[chosen].mean())
