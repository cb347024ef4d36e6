"""Sharpness of a model on data: extreme eigenvalues, trace and spectral density of the Hessian of its mean loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor, nn

from fedflat.analysis.density import Density, draw_density, spectral_density
from fedflat.analysis.drawing import BLUE, RED, dress
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.lanczos import extreme_eigenpairs, first_steps
from fedflat.analysis.problem import Conditions, Options, Protocol, opened
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.core.devices import hosted
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError
from fedflat.extras import blank_figure

NONE_BELOW = 1e-6  # a λ_min above −this·λ_max counts as zero


@dataclass(frozen=True, eq=False)
class Curvature:
    """The Hessian of the mean loss at the model's weights.

    Attributes:
        eigenvalues: The k largest, in descending order.
        residuals: ‖Hv − λv‖ of each, a bound on its error.
        smallest, smallest_residual: The smallest eigenvalue and its residual.
        trace, trace_error: Hutchinson's estimate and its standard error; None if not requested.
        density: See `Density`; None if not requested.
        products: Number of Hessian-vector products computed.
        vectors: Unit eigenvectors of the k largest eigenvalues, one per row.
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
        """λ₁/λ₅; nan if fewer than five eigenvalues are known."""
        return float(self.eigenvalues[0] / self.eigenvalues[4]) if len(self.eigenvalues) >= 5 else math.nan

    @property
    def extremes(self) -> tuple[float, float]:
        """λ_max and λ_min, by value."""
        return float(self.eigenvalues[0]), self.smallest

    @property
    def convexity_ratio(self) -> float:
        """|λ_max/λ_min|; inf if no eigenvalue is negative beyond rounding."""
        largest, smallest = self.extremes
        return math.inf if smallest >= -NONE_BELOW * abs(largest) else abs(largest / smallest)

    def plot(self) -> Any:
        """Eigenvalues by rank with their residuals, and the density if it was computed."""
        figure = blank_figure(10 if self.density else 5, 4)
        axes = figure.subplots(1, 2 if self.density else 1, squeeze=False)[0]
        ranks = range(1, len(self.eigenvalues) + 1)
        axes[0].errorbar(ranks, self.eigenvalues.numpy(), self.residuals.numpy(), fmt="o", markersize=4, color=BLUE)
        axes[0].axhline(self.smallest, color=RED, linewidth=1, label=f"smallest: {self.smallest:.3g}")
        dress(axes[0], "largest eigenvalues of the Hessian", "rank", "λ")
        axes[0].legend(frameon=False)
        if self.density:
            draw_density(axes[1], self.density)
        return figure

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
    tol: float = 1e-3,
    steps: int | None = None,
    multiplicity: bool = False,
    probes: int = 50,
    **options: Unpack[Options],
) -> Curvature:
    """The k largest eigenvalues of the Hessian and the smallest, its trace, and on request its density.

    Args:
        data: A pair (x, y), an iterable of batches, or a map-style dataset.
        k: Number of largest eigenvalues.
        tol, steps, multiplicity: See `extreme_eigenpairs`.
        probes: Largest number of probes for the trace; it stops earlier when the trace changes by less than 0.1 %.
        options: See `Protocol`.
    """
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
            pairs = extreme_eigenpairs(hessian, like, k, tol=tol, steps=steps, multiplicity=multiplicity, seed=seed)
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
            vectors=hosted(top.vectors),
        )


def spectrum(model: nn.Module | FlatModel, data: Any, k: int = 200, **options: Unpack[Options]) -> Curvature:
    """The k largest eigenvalues, or all if there are fewer parameters, without the trace."""
    size = sum(p.numel() for p in _module(model).parameters() if p.requires_grad)
    return curvature(model, data, k=min(k, size) if size else k, trace=False, **options)


def _module(model: nn.Module | FlatModel) -> nn.Module:
    return model.module if isinstance(model, FlatModel) else model


def _basis(hessian: Hessian, k: int) -> str:
    """Memory that the Lanczos basis takes, to announce it beforehand."""
    return f"{first_steps(hessian.size, k) * hessian.size * hessian.like.element_size() / 2**20:.0f} MiB"
