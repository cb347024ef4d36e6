"""Loss and error of a model at many points of the space of its weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedflat.analysis.problem import understood
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Problem, suited, unchecked
from fedflat.analysis.results import plain
from fedflat.analysis.team import Team, shared
from fedflat.errors import InputError
from fedflat.scoring import judge

FORWARD = 0.4  # share of a gradient's time that its forward pass takes, roughly


@dataclass(frozen=True, eq=False)
class Landscape:
    """Loss and error over one or two coordinates.

    axes: the coordinates along each direction. loss, error: one value a point, indexed like the axes; error is the
    share of wrong labels (nan where labels are no classes). test_loss, test_error: the same on the test data, if any.
    marks: coordinates of models that lie in the picture.
    """

    axes: tuple[Tensor, ...]
    loss: Tensor
    error: Tensor
    test_loss: Tensor | None
    test_error: Tensor | None
    marks: dict[str, tuple[float, ...]]
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """A matplotlib figure: curves, or maps with contours."""
        from fedflat.analysis.plots import landscape_figure

        return landscape_figure(self)


def scores(problem: Problem) -> tuple[float, float]:
    """Mean loss and share of wrong labels at the present weights."""
    loss = error = 0.0
    with torch.no_grad(), understood():
        for index, (x, y) in enumerate(problem.batches):
            output, weight = problem.flat.module(suited(x, problem.flat.theta)), problem.weight(index)
            loss += weight * float(problem.value(output, y))
            error += weight * wrong(output, y)
    return loss, error


def wrong(output: Any, y: Tensor) -> float:
    """Share of labels that are not the class of the highest score; nan where that makes no sense."""
    correct, judged = judge(output, y)
    return 1 - correct / judged if judged else math.nan


def survey(
    problem: Problem,
    test: Any,
    points: Sequence[Sequence[float]],
    origin: Tensor,
    directions: Sequence[Tensor],
    refresh: bool = False,
) -> Tensor:
    """Scores at origin + Σ c·direction for the coordinates c of every point, one row each.

    test: more data, or None. refresh: compute BatchNorm's statistics anew at every point from the problem's data.
    """
    problems = [problem]
    if test is not None:
        problems.append(unchecked(problem.flat, test, problem.protocol))
        problems[1].flat = problem.flat
    rows = shared((len(points), 2 * len(problems)), torch.float64)

    def visit(number: int) -> None:
        theta = problem.flat.theta.copy_(origin)
        for direction, coordinate in zip(directions, points[number], strict=True):
            theta.add_(direction, alpha=coordinate)
        if refresh:
            refresh_statistics(problem)
        rows[number] = torch.tensor([value for each in problems for value in scores(each)], dtype=torch.float64)

    with Team(visit, len(points), problem.protocol.workers) as team:
        announce(
            problem.protocol.progress, "landscape", len(points), FORWARD * problem.seconds * len(problems) / team.size
        )
        with tracked(problem.protocol.progress, "landscape", len(points)) as step:
            team.run(lambda job: step())
    return rows.clone()


def refresh_statistics(problem: Problem) -> None:
    """Replace BatchNorm's running statistics by averages over the data at the present weights."""
    norms = [m for m in problem.flat.module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    with torch.no_grad():
        for x, _ in problem.batches:
            problem.flat.module(suited(x, problem.flat.theta))
    for norm in norms:
        norm.eval()


def charted(
    problem: Problem,
    test: Any,
    axes: Sequence[Tensor],
    origin: Tensor,
    directions: Sequence[Tensor],
    marks: dict[str, tuple[float, ...]],
    refresh: bool = False,
) -> Landscape:
    """A landscape over the grid of some axes."""
    points = list(itertools.product(*(axis.tolist() for axis in axes)))
    rows = survey(problem, test, points, origin, directions, refresh)
    shape = [len(axis) for axis in axes]
    columns = [column.reshape(shape) for column in rows.T]
    loss, error, test_loss, test_error = columns if test is not None else (*columns, None, None)
    return Landscape(tuple(axes), loss, error, test_loss, test_error, marks, problem.conditions())


def axis(low: float, high: float, points: int) -> Tensor:
    """Evenly spaced coordinates; where zero lies in the middle it is exactly zero."""
    if points < 2 or not low < high:
        raise InputError(f"an axis needs two points or more and a length, got {points} from {low} to {high}")
    share = torch.arange(points, dtype=torch.float64) / (points - 1)
    return low * (1 - share) + high * share
