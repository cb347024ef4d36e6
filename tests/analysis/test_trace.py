"""Trace, diagonal and density: exact cases, moments, standard errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from analysis.worlds import blobs, network, small, symmetric
from fedflat import analysis
from fedflat.analysis.density import spectral_density
from fedflat.analysis.trace import hutchinson, signs

DIAGONAL = torch.tensor([3.0, -1.0, 0.5, 7.0], dtype=torch.float64)


def test_one_probe_is_exact_for_a_diagonal() -> None:
    found = hutchinson(lambda v: DIAGONAL * v, DIAGONAL, probes=1, diagonal=True)
    assert found.trace == float(DIAGONAL.sum()) and math.isnan(found.trace_error)
    assert found.diagonal is not None and torch.equal(found.diagonal, DIAGONAL)


def test_stops_where_the_mean_settles_also_below_zero() -> None:
    settled = hutchinson(lambda v: -DIAGONAL * v, DIAGONAL, probes=50, tol=1e-3)
    assert settled.probes == 10 and settled.trace == -float(DIAGONAL.sum()) and settled.trace_error == 0
    noisy = -symmetric(torch.linspace(-1, 2, 30, dtype=torch.float64))
    assert hutchinson(lambda v: noisy @ v, noisy[0], probes=40, tol=1e-9).probes == 40


def test_trace_of_a_network_lies_within_its_error() -> None:
    model, x, y, dense = small()
    found = analysis.hessian_trace(model, (x, y), probes=400, tol=0.0)
    assert abs(found.trace - float(dense.trace())) < 3 * found.trace_error
    # Var(vᵀHv) = 2 Σ_{i≠j} H_ij² for random signs
    spread = math.sqrt(2 * float((dense - torch.diag(dense.diag())).square().sum()) / 400)
    assert found.trace_error == pytest.approx(spread, rel=0.15)


def test_diagonal_of_a_network_lies_within_its_error() -> None:
    model, x, y, dense = small()
    found = analysis.hessian_diagonal(model, (x, y), probes=400)
    assert found.diagonal is not None and found.diagonal_error is not None
    away = (found.diagonal - dense.diag()).abs() / found.diagonal_error.clamp_min(1e-12)
    assert float(away.max()) < 4.5 and float((away < 2).double().mean()) > 0.85
    assert found.trace == pytest.approx(float(found.diagonal.sum()), rel=1e-9)


def rules(steps: int) -> tuple[Tensor, analysis.Density]:
    _, _, _, dense = small()
    return dense, spectral_density(lambda v: dense @ v, dense[0], probes=3, steps=steps)


def test_weights_sum_to_one_and_moments_are_those_of_the_probes() -> None:
    """Σ τ = 1, d Σ τϑ = vᵀHv of the raw probe, Σ τϑ² = ‖Hv₀‖²; so on up to 2·steps − 1."""
    dense, density = rules(8)
    for probe in range(3):
        nodes, weights = density.nodes[probe], density.weights[probe]
        v = signs(dense[0], 0, probe)
        unit = v / v.norm()
        assert float(weights.sum()) == pytest.approx(1, rel=1e-12)
        assert len(dense) * float(weights @ nodes) == pytest.approx(float(v @ dense @ v), rel=1e-9)
        assert float(weights @ nodes**2) == pytest.approx(float((dense @ unit).square().sum()), rel=1e-9)
        fifth = float(unit @ torch.linalg.matrix_power(dense, 5) @ unit)
        assert float(weights @ nodes**5) == pytest.approx(fifth, rel=1e-7)


def test_smooth_density_has_integral_one_and_the_mean_of_the_nodes() -> None:
    _, density = rules(100)
    assert density.nodes.shape == (3, 43)
    assert float(torch.trapezoid(density.values, density.grid)) == pytest.approx(1, rel=1e-9)
    mean = float(torch.trapezoid(density.values * density.grid, density.grid))
    assert mean == pytest.approx(density.moment(1), abs=1e-3)
    assert len(density.grid) == 10_000 and density.plot().axes


def test_density_of_a_model_has_the_moments_of_its_hessian() -> None:
    model, x, y, dense = small()
    density = analysis.curvature(model, (x, y), k=1, density=True, trace=False).density
    assert density is not None
    probes = torch.stack([signs(dense[0], 0, probe) for probe in range(10)])
    assert density.moment(1) == pytest.approx(float(((probes @ dense) * probes).sum(1).mean()) / 43, rel=1e-9)
    assert density.moment(2) == pytest.approx(float((probes @ dense).square().sum(1).mean()) / 43, rel=1e-9)


def test_block_traces_sum_to_the_trace() -> None:
    model, data = network(), blobs(12)
    whole = analysis.hessian_diagonal(model, data, probes=3)
    by_tensor = analysis.cross_client([model, model], [data, data], diagonal="tensor_trace", probes=3)
    assert float(by_tensor.diagonals[0].sum()) == pytest.approx(whole.trace, rel=1e-9)
