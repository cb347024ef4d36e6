"""Directions in the space of weights along which a landscape is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedflat import streams
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.lanczos import extreme_eigenpairs
from fedflat.analysis.protocol import Problem, private_copy
from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel

KINDS = ("filter", "eigen")
COLLINEAR = 1e-6  # a third model this close to the line, relative to its distance, spans no plane
ROUNDING = 4.0  # nor one as near as this many roundings of the weights


def gaussian(flat: FlatModel, seed: int, number: int) -> Tensor:
    """A Gaussian vector as long as the weights."""
    draw = torch.randn(flat.size, generator=streams.torch_stream(seed, "direction", number), dtype=torch.float64)
    return draw.to(flat.theta.dtype)


def filter_normalised(flat: FlatModel, direction: Tensor) -> Tensor:
    """Every output filter of the direction at the length of the model's own; biases and norms are not moved.

    Without this, a network and the same one with rescaled layers would look differently sharp (Li et al., 2018).
    """
    out = torch.zeros_like(direction)
    for span in flat.spans:
        if len(span.shape) > 1:
            rows, own = span.channels(direction), span.channels(flat.theta)
            scale = own.norm(dim=1, keepdim=True) / (rows.norm(dim=1, keepdim=True) + 1e-10)
            span.channels(out).copy_(rows * scale)
    return out


def directions_of(problem: Problem, kind: Any, count: int) -> list[Tensor]:
    """So many directions: "filter", "eigen", or tensors given as they are."""
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
    return [one.to(problem.flat.theta.dtype) for one in given]


def eigenvectors(problem: Problem, count: int) -> list[Tensor]:
    """Unit eigenvectors of the largest eigenvalues of the Hessian."""
    with Hessian(problem) as hessian:
        top, _ = extreme_eigenpairs(hessian, problem.flat.theta, count, seed=problem.protocol.seed)
    return list(top.vectors)


def plane(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal directions of the plane through three models, and the coordinates of the models, one row each."""
    rounding = ROUNDING * torch.finfo(first.dtype).eps * float(first.norm())
    to_second, to_third = second.double() - first.double(), third.double() - first.double()
    length, distance = to_second.norm(), to_third.norm()
    if float(length) == 0:
        raise InputError("the first two models are the same: they span no plane; give three different ones")
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
    """The trainable weights of a model of the same architecture as one vector; a vector stays as it is."""
    if isinstance(model, Tensor):
        vector = model.detach()
        same = vector.shape == like.theta.shape
    else:
        other = private_copy(model)
        vector, same = other.theta, [span.shape for span in other.spans] == [span.shape for span in like.spans]
    if not same:
        raise InputError(
            f"models of one architecture are needed: one has {like.size} weights, one {vector.numel()}, in other shapes"
        )
    if not bool(vector.isfinite().all()):
        raise InputError("the weights of one of the models are not finite")
    return vector.to(like.theta.dtype)
