"""Pictures of the loss around a model, and between models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from fedflat.analysis.directions import directions_of, plane, weights_of
from fedflat.analysis.protocol import Options, Problem, Protocol, opened
from fedflat.analysis.survey import Landscape, axis, charted
from fedflat.flat import FlatModel

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

    direction: "filter" (random, each filter at the length of the model's own), "eigen" (unit eigenvector of the
    largest eigenvalue), or a vector. test: more data to evaluate on. `Protocol` explains the further options.
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
    """The same over two directions. points: a side; 51 by default, 41 along eigenvectors."""
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

    u = θ₂ − θ₁, v = (θ₃ − θ₁) less its part along u; the axes are distances from θ₁ along both.
    margin: how far the picture goes beyond, as a share of ‖u‖ and ‖v‖. second, third: models or weight vectors.
    refresh_bn: BatchNorm's statistics are computed anew at every point, from `data`.
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
    """Loss and error on the line from one model (0) to another (1). margin: how far beyond both ends."""
    with opened(first, data, Protocol.of(options)) as problem:
        origin = problem.flat.theta.clone()
        step = weights_of(second, problem.flat) - origin
        marks: dict[str, tuple[float, ...]] = {"model 1": (0.0,), "model 2": (1.0,)}
        line = axis(-margin, 1 + margin, points)
        return charted(problem, test, [line], origin, [step], marks, refresh_bn)
