"""How differently curved the models of several clients are: H_N and H_D of FedAlign (paper 001, eqs. 3–4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.data import read
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Options, Problem, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel

DIAGONALS = ("element", "tensor_trace")
PAIRS = ("distinct", "all")
ON = ("client", "global")


@dataclass(frozen=True, eq=False)
class CrossClient:
    """H_N, the mean squared difference of the lengths of the clients' Hessian diagonals, and H_D, their mean cosine.

    norm: H_N. direction: H_D. conditions: of each client. diagonals: q_k, one row a client.
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

    data: one data set a model. on: "client" evaluates each model on its own data, "global" every one on all data.
    diagonal: "element", as in the paper's equations, or "tensor_trace", one number a tensor, as in its code.
    pairs: "distinct" clients, or "all", which counts each client with itself too, as the code does.
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
    q = torch.stack(rows)
    return CrossClient(*compare_diagonals(q, pairs), tuple(conditions), q)


def _diagonal(problem: Problem, kind: str, probes: int) -> Tensor:
    protocol, like = problem.protocol, problem.flat.theta
    with Hessian(problem) as hessian:
        announce(protocol.progress, "diagonal", probes, hessian.seconds)
        with tracked(protocol.progress, "diagonal", probes) as hessian.step:
            found = hutchinson(hessian, like, probes=probes, diagonal=True, seed=protocol.seed).diagonal
    assert found is not None  # since it was asked for
    if kind == "element":
        return found
    return torch.stack([span.of(found).sum() for span in problem.flat.spans])


def compare_diagonals(q: Tensor, pairs: str = "distinct") -> tuple[float, float]:
    """H_N and H_D of diagonals q, one row a client. Identical rows give 0 and 1."""
    if pairs not in PAIRS:
        raise UnknownNameError("pairs", pairs, PAIRS)
    if q.dim() != 2 or len(q) < 2:
        raise InputError(f"two rows or more are needed, one a client, got shape {tuple(q.shape)}")
    norms = q.norm(dim=1)
    apart = (norms[:, None] - norms[None, :]) ** 2
    cosine = (q @ q.T) / (norms[:, None] * norms[None, :])
    chosen = torch.ones_like(apart, dtype=torch.bool) if pairs == "all" else ~torch.eye(len(q), dtype=torch.bool)
    return float(apart[chosen].mean()), float(cosine[chosen].mean())
