"""Density of the eigenvalues by stochastic Lanczos quadrature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedflat.analysis.drawing import BLUE, dress
from fedflat.analysis.hvp import Product
from fedflat.analysis.lanczos import Krylov
from fedflat.analysis.results import plain
from fedflat.analysis.trace import signs
from fedflat.core import streams
from fedflat.errors import InputError
from fedflat.extras import blank_figure

VARIANCE, POINTS, MARGIN = 1e-5, 10_000, 0.01
FLOOR = 1e-6  # densities below this are not drawn


@dataclass(frozen=True, eq=False)
class Density:
    """Density of the eigenvalues.

    Attributes:
        nodes, weights: The quadrature, one row per probe; the weights of a row sum to one.
        grid, values: The density smoothed by Gaussians; its integral is one.
    """

    nodes: Tensor
    weights: Tensor
    grid: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @classmethod
    def of(cls, nodes: Tensor, weights: Tensor) -> Density:
        """The density of a quadrature of any precision."""
        nodes, weights = nodes.double(), weights.double()
        return cls(nodes, weights, *_smooth(nodes, weights))

    def moment(self, power: int) -> float:
        """Estimate of tr(H^power)/d, the mean of λ^power."""
        return float((self.weights * self.nodes**power).sum(1).mean())

    def plot(self) -> Any:
        """The smoothed density."""
        figure = blank_figure(6, 4)
        draw_density(figure.subplots(), self)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The quadrature as lists; `Density.of` computes the smoothed curve from it."""
        return plain(self)


def spectral_density(product: Product, like: Tensor, *, probes: int = 10, steps: int = 100, seed: int = 0) -> Density:
    """Density of the eigenvalues of an operator.

    Args:
        product: v ↦ Hv.
        like: A vector with the size, type and device of v.
        probes: Number of random start vectors, whose densities are averaged.
        steps: Number of Lanczos steps per probe; the first 2·steps moments of a probe are exact.
    """
    if probes < 1 or steps < 1:
        raise InputError(f"at least one probe and one step are needed, got {probes} and {steps}")
    steps = min(steps, like.numel())
    rules = [_rule(product, like, steps, seed, probe) for probe in range(probes)]
    nodes, weights = (torch.stack(parts) for parts in zip(*rules, strict=True))
    return Density.of(nodes, weights)


def _rule(product: Product, like: Tensor, steps: int, seed: int, probe: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of one probe."""
    stream = streams.stream(seed, "density", probe)
    krylov = Krylov(product, like.numel(), like, stream).begin(signs(like, seed, probe))
    for _ in range(steps):
        krylov.extend()
    nodes, columns, _ = krylov.ritz()
    return nodes, columns[0].square()


def _smooth(nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    low, high = float(nodes.min()), float(nodes.max())
    sigma2 = VARIANCE * max(1.0, high - low)
    grid = torch.linspace(low - MARGIN, high + MARGIN, POINTS, dtype=torch.float64)
    values = torch.zeros_like(grid)
    for places, masses in zip(nodes, weights, strict=True):
        values += torch.exp(-((grid[:, None] - places) ** 2) / (2 * sigma2)) @ masses
    return grid, values / torch.trapezoid(values, grid)


def draw_density(axes: Any, result: Density) -> None:
    """Draw the density on a logarithmic axis."""
    axes.semilogy(result.grid.numpy(), result.values.clamp_min(FLOOR).numpy(), color=BLUE, linewidth=1.2)
    axes.set_ylim(bottom=FLOOR)
    dress(axes, "density of the eigenvalues", "λ", "density")
