"""Sharpness of a model on data: extreme eigenvalues, trace and spectral density of the Hessian of its mean loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor, nn

from fedflat.analysis.density import Density, spectral_density
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.lanczos import Eigenpairs, extreme_eigenpairs, first_steps
from fedflat.analysis.power import power_iteration
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Options, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel

METHODS = ("lanczos", "power")
NONE_BELOW = 1e-6  # a λ_min above −this·λ_max counts as zero


@dataclass(frozen=True, eq=False)
class Curvature:
    """The Hessian of a mean loss at a point.

    eigenvalues: the k largest, descending; residuals: ‖Hv − λv‖ of each, a bound of its error.
    smallest: the smallest eigenvalue; smallest_residual: its residual.
    trace, trace_error: Hutchinson's estimate and its standard error; None where not asked for.
    density: see `Density`. vectors: unit eigenvectors in rows. products: Hessian products spent.
    """

    eigenvalues: Tensor
    residuals: Tensor
    smallest: float
    smallest_residual: float
    trace: float | None
    trace_error: float | None
    density: Density | None
    products: int
    conditions: Conditions
    vectors: Tensor = field(repr=False)

    @property
    def sharpness_ratio(self) -> float:
        """λ₁/λ₅; nan where fewer than five are known."""
        return float(self.eigenvalues[0] / self.eigenvalues[4]) if len(self.eigenvalues) >= 5 else math.nan

    @property
    def extremes(self) -> tuple[float, float]:
        """λ_max and λ_min, by value."""
        return float(self.eigenvalues[0]), self.smallest

    @property
    def convexity_ratio(self) -> float:
        """|λ_max/λ_min|; inf where no eigenvalue is negative beyond rounding (see `extremes`)."""
        largest, smallest = self.extremes
        return math.inf if smallest >= -NONE_BELOW * abs(largest) else abs(largest / smallest)

    def plot(self) -> Any:
        """A matplotlib figure of the eigenvalues, beside the density where it is known."""
        from fedflat.analysis.plots import curvature_figure

        return curvature_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only; without the vectors."""
        return plain(self, "sharpness_ratio", "convexity_ratio")


def curvature(
    model: nn.Module | FlatModel,
    data: Any,
    *,
    k: int = 5,
    trace: bool = True,
    density: bool = False,
    method: str = "lanczos",
    tol: float = 1e-3,
    steps: int | None = None,
    multiplicity: bool = False,
    probes: int = 50,
    **options: Unpack[Options],
) -> Curvature:
    """The k largest eigenvalues of the Hessian and the smallest, its trace, and on request its density.

    data: a pair (x, y), an iterable of batches, or a map-style dataset. `Protocol` explains the further options.
    method: "lanczos" or "power". tol, steps, multiplicity: of the method; see `extreme_eigenpairs`, `power_iteration`.
    probes: at most so many for the trace, which stops early where it settles to 1e-3.
    """
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    protocol = Protocol.of(options)
    with opened(model, data, protocol) as problem, Hessian(problem) as hessian:
        if not 1 <= k <= hessian.size:
            raise InputError(f"k must be from 1 to the number of parameters, {hessian.size}; got {k}")
        like, seed = problem.flat.theta, protocol.seed
        expected = (steps or first_steps(hessian.size, k)) + trace * probes + density * 10 * min(100, hessian.size)
        announce(
            protocol.progress, "curvature", expected, hessian.seconds, note=f", {_basis(hessian, k)} for eigenvectors"
        )
        with tracked(protocol.progress, "curvature", expected) as hessian.step:
            if method == "lanczos":
                pairs = extreme_eigenpairs(hessian, like, k, tol=tol, steps=steps, multiplicity=multiplicity, seed=seed)
            else:
                pairs = _both_ends(hessian, like, k, tol, steps or 100, seed)
            found = hutchinson(hessian, like, probes=probes, tol=1e-3, seed=seed) if trace else None
            shape = spectral_density(hessian, like, seed=seed) if density else None
        top, bottom = pairs
        return Curvature(
            eigenvalues=top.values,
            residuals=top.residuals,
            smallest=float(bottom.values[0]),
            smallest_residual=float(bottom.residuals[0]),
            trace=found.trace if found else None,
            trace_error=found.trace_error if found else None,
            density=shape,
            products=hessian.count,
            conditions=problem.conditions(),
            vectors=top.vectors,
        )


def spectrum(model: nn.Module | FlatModel, data: Any, k: int = 200, **options: Unpack[Options]) -> Curvature:
    """The k largest eigenvalues, or all where there are fewer parameters, without the trace."""
    size = sum(p.numel() for p in _module(model).parameters() if p.requires_grad)
    return curvature(model, data, k=min(k, size) if size else k, trace=False, **options)


def _module(model: nn.Module | FlatModel) -> nn.Module:
    return model.module if isinstance(model, FlatModel) else model


def _both_ends(
    hessian: Hessian, like: Tensor, k: int, tol: float, steps: int, seed: int
) -> tuple[Eigenpairs, Eigenpairs]:
    top = power_iteration(hessian, like, k, tol=tol, steps=steps, seed=seed)
    bottom = power_iteration(lambda v: -hessian(v), like, 1, tol=tol, steps=steps, seed=seed)
    return top, Eigenpairs(-bottom.values, bottom.vectors, bottom.residuals)


def _basis(hessian: Hessian, k: int) -> str:
    """Memory that Lanczos' basis will take, for the user to know beforehand."""
    return f"{first_steps(hessian.size, k) * hessian.size * hessian.dtype.itemsize / 2**20:.0f} MiB"
