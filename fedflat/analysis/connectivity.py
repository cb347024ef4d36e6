"""The loss on straight lines between models: do they lie in one valley?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.directions import weights_of
from fedflat.analysis.drawing import draw_matrix
from fedflat.analysis.landscape import axis, score_points
from fedflat.analysis.problem import Conditions, Options, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError
from fedflat.extras import blank_figure

AnyModel = nn.Module | FlatModel


@dataclass(frozen=True, eq=False)
class Connectivity:
    """The loss on the straight line between each pair of models.

    Attributes:
        loss: Symmetric matrix; the diagonal has the loss of each model, the rest the highest loss between two models.
        barrier: Symmetric matrix; the largest excess of the loss over the linear interpolation between the losses at
            both ends, at least 0.
    """

    loss: Tensor
    barrier: Tensor
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """The barriers between all pairs."""
        figure = blank_figure(5, 4.2)
        draw_matrix(figure, figure.subplots(), self.barrier, "barrier between two models", range(len(self.barrier)))
        return figure


def connectivity(
    models: Sequence[AnyModel], data: Any, *, points: int = 11, refresh_bn: bool = True, **options: Unpack[Options]
) -> Connectivity:
    """The loss on the straight lines between all pairs of models.

    Args:
        points: Number of points per line.
        refresh_bn: Compute BatchNorm's statistics anew from `data` at every point.
    """
    if len(models) < 2:
        raise InputError(f"at least two models are needed, got {len(models)}")
    with opened(models[0], data, Protocol.of(options)) as problem:
        vectors = [weights_of(model, problem.flat) for model in models]
        pairs = list(itertools.combinations(range(len(models)), 2))
        share = axis(0.0, 1.0, points)
        places = [_mixed(len(models), a, b, float(t)) for a, b in pairs for t in share]
        losses = score_points(problem, None, places, torch.zeros_like(vectors[0]), vectors, refresh_bn)[:, 0]
        highest, barrier = (torch.zeros(len(models), len(models), dtype=torch.float64) for _ in range(2))
        for (a, b), line in zip(pairs, losses.reshape(len(pairs), points), strict=True):
            highest[a, a], highest[b, b] = line[0], line[-1]
            highest[a, b] = highest[b, a] = line.max()
            straight = (1 - share) * line[0] + share * line[-1]
            barrier[a, b] = barrier[b, a] = (line - straight).max().clamp_min(0)
        return Connectivity(highest, barrier, problem.conditions())


def _mixed(count: int, a: int, b: int, t: float) -> list[float]:
    return [1 - t if place == a else t if place == b else 0.0 for place in range(count)]
