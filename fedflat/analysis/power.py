"""The largest eigenvalues by power iteration with deflation: slower than Lanczos' method, but with two vectors only."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat import streams
from fedflat.analysis.hvp import Product
from fedflat.analysis.lanczos import Eigenpairs
from fedflat.errors import InputError


def power_iteration(
    product: Product, like: Tensor, k: int = 1, *, tol: float = 1e-3, steps: int = 100, seed: int = 0
) -> Eigenpairs:
    """The k largest eigenpairs (by value, not by magnitude) of an operator on vectors such as `like`.

    tol: stop when λ changes by less than this share. steps: at most so many products a vector, twice where the
    eigenvalue of largest magnitude is negative: then H + |λ|I is iterated instead and |λ| subtracted.
    """
    if not 1 <= k <= like.numel():
        raise InputError(f"k must be from 1 to the number of parameters, {like.numel()}; got {k}")
    if steps < 1:
        raise InputError(f"at least one step is needed, got {steps}")
    values, residuals, rows = [], [], like.new_empty(0, like.numel())
    for place in range(k):
        start = torch.randn(like.numel(), generator=streams.torch_stream(seed, "power", place), dtype=torch.float64)
        value, vector, residual = _dominant(product, start.to(like.dtype), rows, 0.0, tol, steps)
        if value < 0:
            value, vector, residual = _dominant(product, start.to(like.dtype), rows, -value, tol, steps)
        values.append(value)
        residuals.append(residual)
        rows = torch.cat([rows, vector[None]])
    order = torch.tensor(values, dtype=torch.float64).argsort(descending=True)
    pairs = Eigenpairs(torch.tensor(values, dtype=torch.float64), rows, torch.tensor(residuals, dtype=torch.float64))
    return pairs[order]


def _dominant(
    product: Product, vector: Tensor, found: Tensor, shift: float, tol: float, steps: int
) -> tuple[float, Tensor, float]:
    """Eigenvalue of largest |λ + shift| in the complement of what was found, its vector and residual."""
    vector = _unit(vector, found)
    value, residual = float("nan"), float("inf")
    for _ in range(steps):
        image = product(vector)
        new = float(vector @ image)
        residual = float((image - new * vector).norm())
        settled = abs(new - value) / (abs(new) + 1e-6) < tol
        value = new
        image = image + shift * vector
        if settled or not float(_unit(image, found).norm()):
            break  # the vector returned is the one whose value and residual are
        vector = _unit(image, found)
    return value, vector, residual


def _unit(vector: Tensor, found: Tensor) -> Tensor:
    """Made orthogonal to the rows found, at length one (or zero where nothing is left)."""
    for _ in range(2):
        vector = vector - found.T @ (found @ vector)
    return torch.div(vector, vector.norm().clamp_min(torch.finfo(vector.dtype).tiny))
