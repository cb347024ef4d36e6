"""Density of the eigenvalues by stochastic Lanczos quadrature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedflat import streams
from fedflat.analysis.hvp import Product
from fedflat.analysis.lanczos import Krylov
from fedflat.analysis.results import plain
from fedflat.analysis.trace import signs
from fedflat.errors import InputError

VARIANCE, POINTS, MARGIN = 1e-5, 10_000, 0.01


@dataclass(frozen=True, eq=False)
class Density:
    """Where the eigenvalues lie.

    nodes, weights: the quadrature, one row a probe; the weights of a row sum to one.
    grid, values: the same smoothed by Gaussians, with integral one.
    """

    nodes: Tensor
    weights: Tensor
    grid: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @classmethod
    def of(cls, nodes: Tensor, weights: Tensor) -> Density:
        """The density of a quadrature, whatever the precision that it is given in."""
        nodes, weights = nodes.double(), weights.double()
        return cls(nodes, weights, *_smooth(nodes, weights))

    def moment(self, power: int) -> float:
        """Estimate of tr(H^power)/d, the mean of λ^power."""
        return float((self.weights * self.nodes**power).sum(1).mean())

    def plot(self) -> Any:
        """A matplotlib figure with a logarithmic density."""
        from fedflat.analysis.plots import density_figure

        return density_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists only; the quadrature, from which the smooth curve follows."""
        return plain(self)


def spectral_density(product: Product, like: Tensor, *, probes: int = 10, steps: int = 100, seed: int = 0) -> Density:
    """Density of the eigenvalues of an operator on vectors such as `like`.

    probes: random vectors, averaged. steps: Lanczos steps with each; so many moments of a probe are exact, twice over.
    """
    if probes < 1 or steps < 1:
        raise InputError(f"at least one probe and one step are needed, got {probes} and {steps}")
    steps = min(steps, like.numel())
    rules = [_rule(product, like, steps, seed, probe) for probe in range(probes)]
    nodes, weights = (torch.stack(parts) for parts in zip(*rules, strict=True))
    return Density.of(nodes, weights)


def _rule(product: Product, like: Tensor, steps: int, seed: int, probe: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of one probe."""
    generator = streams.torch_stream(seed, "density", probe)
    krylov = Krylov(product, like.numel(), like, generator).begin(signs(like, seed, probe))
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
