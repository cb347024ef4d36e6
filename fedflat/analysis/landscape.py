"""The loss around a model and between models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.directions import directions_of, plane, weights_of
from fedflat.analysis.drawing import BLUE, QUIET, dress
from fedflat.analysis.parallel import Parallel
from fedflat.analysis.problem import Conditions, Options, Problem, Protocol, opened, suited, unchecked, understood
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.core.batchnorm import averaging_statistics, batchnorms
from fedflat.core.flat import FlatModel
from fedflat.core.scores import judge
from fedflat.core.shared_memory import shared_zeros
from fedflat.errors import InputError
from fedflat.extras import blank_figure

FORWARD = 0.4  # approximate fraction of a gradient's time that the forward pass takes


@dataclass(frozen=True, eq=False)
class Landscape:
    """Loss and error over one or two coordinates.

    Attributes:
        axes: The coordinates along each direction.
        loss: One value per point, indexed like the axes.
        error: The fraction of wrong predictions per point; nan if labels are not classes.
        test_loss, test_error: The same on the test data; None without test data.
        marks: Coordinates of the models, by name.
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
        """Loss on the left, error on the right (on the test data if there is any)."""
        figure = blank_figure(10, 4.2)
        error = self.error if self.test_error is None else self.test_error
        titles = "loss", "error" if self.test_error is None else "test error"
        for axes, values, title in zip(figure.subplots(1, 2), (self.loss, error), titles, strict=True):
            draw = _draw_line if len(self.axes) == 1 else _draw_map
            draw(figure, axes, self, values)
            dress(axes, title, "first direction", "second direction" if len(self.axes) == 2 else "")
        return figure


def _draw_line(figure: Any, axes: Any, result: Landscape, values: Any) -> None:
    axes.plot(result.axes[0].numpy(), values.numpy(), color=BLUE)
    for name, (place,) in result.marks.items():
        axes.axvline(place, color=QUIET, linewidth=0.8, linestyle=":")
        axes.annotate(name, (place, 1), xycoords=("data", "axes fraction"), fontsize=8, color=QUIET, va="top")


def _draw_map(figure: Any, axes: Any, result: Landscape, values: Any) -> None:
    filled = axes.contourf(*(axis.numpy() for axis in result.axes), values.T.numpy(), levels=24, cmap="viridis")
    figure.colorbar(filled, ax=axes)
    for name, place in result.marks.items():
        axes.plot(*place, "o", color="white", markeredgecolor="black")
        axes.annotate(name, place, xytext=(4, 4), textcoords="offset points", fontsize=8, color="white")


def scores(problem: Problem) -> tuple[float, float]:
    """Mean loss and fraction of wrong predictions at the current weights."""
    losses, judged = [], []
    with torch.no_grad(), understood():
        for x, y in problem.batches:
            output = problem.flat.module(suited(x, problem.flat.theta))
            losses.append(problem.value(output, y))
            judged.append(judge(output, y))
    wrong = [1 - right / count if count else math.nan for right, count in torch.stack(judged).tolist()]
    return problem.mean(torch.stack(losses).tolist()), problem.mean(wrong)


def score_points(
    problem: Problem,
    test: Any,
    points: Sequence[Sequence[float]],
    origin: Tensor,
    directions: Sequence[Tensor],
    refresh: bool = False,
) -> Tensor:
    """Loss and error at origin + Σ c·direction, one row per point with coordinates c.

    Args:
        test: Test data, which add two columns; None for none.
        refresh: Compute BatchNorm's statistics anew from the problem's data at every point.
    """
    problems = [problem]
    if test is not None:
        problems.append(unchecked(problem.flat, test, problem.protocol))
        problems[1].flat = problem.flat
    rows = shared_zeros((len(points), 2 * len(problems)), torch.float64)  # numbers that the host has read

    def score_point(number: int) -> None:
        theta = problem.flat.theta.copy_(origin)
        for direction, coordinate in zip(directions, points[number], strict=True):
            theta.add_(direction, alpha=coordinate)
        if refresh:
            refresh_statistics(problem)
        rows[number] = torch.tensor([value for each in problems for value in scores(each)], dtype=torch.float64)

    with Parallel(score_point, len(points), problem.workers) as parallel:
        announce(
            problem.protocol.progress,
            "landscape",
            len(points),
            FORWARD * problem.seconds * len(problems) / parallel.size,
        )
        with tracked(problem.protocol.progress, "landscape", len(points)) as step:
            parallel.run(lambda job: step())
    return rows.clone()


def refresh_statistics(problem: Problem) -> None:
    """Replace BatchNorm's running statistics by averages over the data at the current weights."""
    if batchnorms(problem.flat.module):
        with averaging_statistics(problem.flat.module), torch.no_grad():
            for x, _ in problem.batches:
                problem.flat.module(suited(x, problem.flat.theta))


def charted(
    problem: Problem,
    test: Any,
    axes: Sequence[Tensor],
    origin: Tensor,
    directions: Sequence[Tensor],
    marks: dict[str, tuple[float, ...]],
    refresh: bool = False,
) -> Landscape:
    """The landscape over the grid of the axes; see `score_points`."""
    points = list(itertools.product(*(axis.tolist() for axis in axes)))
    rows = score_points(problem, test, points, origin, directions, refresh)
    shape = [len(axis) for axis in axes]
    columns = [column.reshape(shape) for column in rows.T]
    loss, error, test_loss, test_error = columns if test is not None else (*columns, None, None)
    return Landscape(tuple(axes), loss, error, test_loss, test_error, marks, problem.conditions())


def axis(low: float, high: float, points: int) -> Tensor:
    """Evenly spaced coordinates; a zero in the middle is exact."""
    if points < 2 or not low < high:
        raise InputError(f"an axis needs two points or more and a length, got {points} from {low} to {high}")
    share = torch.arange(points, dtype=torch.float64) / (points - 1)
    return low * (1 - share) + high * share


AnyModel = nn.Module | FlatModel


def landscape_1d(
    model: AnyModel,
    data: Any,
    *,
    direction: str | Tensor = "filter",
    points: int = 51,
    radius: float = 1.0,
    test: Any = None,
    **options: Unpack[Options],
) -> Landscape:
    """Loss and error along one direction, from −radius to radius.

    Args:
        direction: "filter" (random, each filter scaled to the norm of the model's), "eigen" (unit eigenvector of the
            largest eigenvalue of the Hessian), or a vector.
        points: Number of points.
        test: Test data to evaluate as well.
        options: See `Protocol`.
    """
    with opened(model, data, Protocol.of(options)) as problem:
        return _around(problem, test, direction, 1, points, radius)


def landscape_2d(
    model: AnyModel,
    data: Any,
    *,
    direction: str | Sequence[Tensor] = "filter",
    points: int | None = None,
    radius: float = 1.0,
    test: Any = None,
    **options: Unpack[Options],
) -> Landscape:
    """Loss and error over two directions; see `landscape_1d`.

    Args:
        points: Number of points per axis; 51 by default, 41 for eigenvectors.
    """
    if points is None:
        points = 41 if direction == "eigen" else 51
    with opened(model, data, Protocol.of(options)) as problem:
        return _around(problem, test, direction, 2, points, radius)


def _around(problem: Problem, test: Any, direction: Any, count: int, points: int, radius: float) -> Landscape:
    directions = directions_of(problem, direction, count)
    axes = [axis(-radius, radius, points)] * count
    origin = problem.flat.theta.clone()
    return charted(problem, test, axes, origin, directions, {"model": (0.0,) * count})


def landscape_plane(
    first: AnyModel,
    second: AnyModel | Tensor,
    third: AnyModel | Tensor,
    data: Any,
    *,
    points: int = 21,
    margin: float = 0.2,
    test: Any = None,
    refresh_bn: bool = True,
    **options: Unpack[Options],
) -> Landscape:
    """Loss and error in the plane through three models of one architecture.

    u = θ₂ − θ₁, v = (θ₃ − θ₁) minus its component along u; the axes are distances from θ₁ along both.

    Args:
        second, third: Models or weight vectors.
        points: Number of points per axis.
        margin: How far the plane extends beyond the models, as a fraction of ‖u‖ and ‖v‖.
        test: Test data to evaluate as well.
        refresh_bn: Compute BatchNorm's statistics anew from `data` at every point.
    """
    with opened(first, data, Protocol.of(options)) as problem:
        origin = problem.flat.theta.clone()
        u, v, corners = plane(origin, weights_of(second, problem.flat), weights_of(third, problem.flat))
        sides = float(corners[1, 0]), float(corners[2, 1])
        axes = [axis(-margin * side, (1 + margin) * side, points) for side in sides]
        marks = {f"model {number}": tuple(place) for number, place in enumerate(corners.tolist(), start=1)}
        return charted(problem, test, axes, origin, [u, v], marks, refresh_bn)


def interpolate(
    first: AnyModel,
    second: AnyModel | Tensor,
    data: Any,
    *,
    points: int = 21,
    margin: float = 0.0,
    test: Any = None,
    refresh_bn: bool = True,
    **options: Unpack[Options],
) -> Landscape:
    """Loss and error on the line from one model (0) to another (1); see `landscape_plane`."""
    with opened(first, data, Protocol.of(options)) as problem:
        origin = problem.flat.theta.clone()
        step = weights_of(second, problem.flat) - origin
        marks: dict[str, tuple[float, ...]] = {"model 1": (0.0,), "model 2": (1.0,)}
        line = axis(-margin, 1 + margin, points)
        return charted(problem, test, [line], origin, [step], marks, refresh_bn)
