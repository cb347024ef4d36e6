"""Directions in weight space along which a landscape is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedflat.analysis.hvp import Hessian
from fedflat.analysis.lanczos import extreme_eigenpairs
from fedflat.analysis.problem import Problem, private_copy
from fedflat.core import streams
from fedflat.core.devices import on
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError, UnknownNameError

KINDS = ("filter", "eigen")
COLLINEAR = 1e-6  # a third model this close to the line, relative to its distance, spans no plane
ROUNDING = 4.0  # nor does one within this many rounding errors of the weights


def gaussian(flat: FlatModel, seed: int, number: int) -> Tensor:
    """A Gaussian vector with one entry per weight."""
    draw = streams.stream(seed, "direction", number).normal(flat.size, torch.float64)
    return on(draw.to(flat.theta.dtype), flat.theta.device)


def filter_normalised(flat: FlatModel, direction: Tensor) -> Tensor:
    """Scale every output filter of the direction to the norm of the model's filter; biases and norm layers get 0.

    Otherwise a network and its copy with rescaled layers would seem differently sharp (Li et al., 2018).
    """
    out = torch.zeros_like(direction)
    for span in flat.spans:
        if len(span.shape) > 1:
            rows, own = span.channels(direction), span.channels(flat.theta)
            scale = own.norm(dim=1, keepdim=True) / (rows.norm(dim=1, keepdim=True) + 1e-10)
            span.channels(out).copy_(rows * scale)
    return out


def directions_of(problem: Problem, kind: Any, count: int) -> list[Tensor]:
    """`count` directions of a kind: "filter", "eigen", or the given tensors."""
    if isinstance(kind, str):
        if kind not in KINDS:
            raise UnknownNameError("direction", kind, KINDS)
        if kind == "eigen":
            return eigenvectors(problem, count)
        flat, seed = problem.flat, problem.protocol.seed
        return [filter_normalised(flat, gaussian(flat, seed, number)) for number in range(count)]
    given = [kind] if isinstance(kind, Tensor) else list(kind)
    if len(given) != count or any(one.shape != problem.flat.theta.shape for one in given):
        raise InputError(f"{count} directions of {problem.flat.size} entries are needed")
    return [on(one.detach().to(problem.flat.theta.dtype), problem.device) for one in given]


def eigenvectors(problem: Problem, count: int) -> list[Tensor]:
    """Unit eigenvectors of the largest eigenvalues of the Hessian."""
    with Hessian(problem) as hessian:
        top, _ = extreme_eigenpairs(hessian, problem.flat.theta, count, seed=problem.protocol.seed)
    return list(top.vectors)


def plane(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two orthonormal directions of the plane through three models, and the models' coordinates, one row each."""
    rounding = ROUNDING * torch.finfo(first.dtype).eps * float(first.norm())
    to_second, to_third = second.double() - first.double(), third.double() - first.double()
    length, distance = to_second.norm(), to_third.norm()
    if float(length) == 0:
        raise InputError("the first two models are equal: they span no plane; give three different ones")
    u = to_second / length
    along = u @ to_third
    rest = to_third - along * u
    rest = rest - (u @ rest) * u
    height = rest.norm()
    if float(height) <= max(COLLINEAR * max(float(distance), float(length)), rounding):
        raise InputError("the three models lie on one line, so they span no plane; use interpolate() for a line")
    corners = torch.tensor([[0.0, 0.0], [float(length), 0.0], [float(along), float(height)]], dtype=torch.float64)
    return u.to(first.dtype), (rest / height).to(first.dtype), corners


def weights_of(model: nn.Module | FlatModel | Tensor, like: FlatModel) -> Tensor:
    """The trainable weights of a model with the architecture of `like`, as a vector; a vector is returned as it is."""
    if isinstance(model, Tensor):
        vector = model.detach()
        same = vector.shape == like.theta.shape
    else:
        other = private_copy(model)
        vector, same = other.theta, [span.shape for span in other.spans] == [span.shape for span in like.spans]
    if not same:
        raise InputError(
            f"the models must have one architecture: one has {like.size} weights, one {vector.numel()}, in other shapes"
        )
    if not bool(vector.isfinite().all()):
        raise InputError("the weights of one of the models are not finite")
    return on(vector.to(like.theta.dtype), like.theta.device)
