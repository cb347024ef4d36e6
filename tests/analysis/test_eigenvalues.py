"""Lanczos against dense eigenvalues: both ends, multiplicities, no ghosts."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn

from analysis.worlds import blobs, eigenvalues, first, network, quadratic, small, symmetric
from fedflat import analysis
from fedflat.analysis.lanczos import Krylov, extreme_eigenpairs
from fedflat.core.streams import stream


def operator(matrix: Tensor) -> tuple[object, Tensor]:
    return lambda v: matrix @ v, torch.empty(len(matrix), dtype=matrix.dtype)


def test_network_against_the_dense_hessian() -> None:
    model, x, y, dense = small()
    exact = eigenvalues(dense)
    found = analysis.curvature(model, (x, y), k=10, tol=1e-12)
    torch.testing.assert_close(found.eigenvalues, exact[:10], rtol=1e-8, atol=0)
    assert found.smallest == pytest.approx(float(exact[-1]), rel=1e-8)
    assert found.sharpness_ratio == pytest.approx(float(exact[0] / exact[4]), rel=1e-8)
    assert found.convexity_ratio == pytest.approx(abs(float(exact[0] / exact[-1])), rel=1e-8)
    torch.testing.assert_close(dense @ found.vectors.T, found.vectors.T * found.eigenvalues, rtol=0, atol=1e-9)


def test_all_eigenvalues_of_a_small_network() -> None:
    model, x, y, dense = small()
    found = analysis.spectrum(model, (x, y), k=200)
    assert found.trace is None
    torch.testing.assert_close(found.eigenvalues, eigenvalues(dense), rtol=1e-8, atol=1e-13)


def test_residuals_are_true_and_bound_the_error() -> None:
    exact = torch.linspace(-3, 5, 300, dtype=torch.float64)
    matrix = symmetric(exact)
    product, like = operator(matrix)
    top, bottom = extreme_eigenpairs(product, like, 6, steps=40)
    for pairs in (top, bottom):
        true = (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)
        torch.testing.assert_close(pairs.residuals, true, rtol=1e-6, atol=1e-10)
        nearest = (pairs.values[:, None] - exact).abs().min(1).values
        assert bool((nearest <= pairs.residuals + 1e-12).all())


def test_goes_on_until_the_tolerance_is_met() -> None:
    exact = torch.linspace(-3, 5, 300, dtype=torch.float64)
    product, like = operator(symmetric(exact))
    top, _ = extreme_eigenpairs(product, like, 6, tol=1e-6)
    assert float(top.residuals.max()) <= 5e-6
    torch.testing.assert_close(top.values, exact.flip(0)[:6], rtol=1e-8, atol=0)


def test_says_when_it_did_not_converge(caplog: pytest.LogCaptureFixture) -> None:
    product, like = operator(symmetric(torch.linspace(0, 1, 400, dtype=torch.float64) ** 0.1))
    extreme_eigenpairs(product, like, 5, tol=1e-9)
    assert "after 160 products the largest residual is" in caplog.text


def test_basis_stays_orthonormal_and_shows_no_ghosts() -> None:
    """One dominant eigenvalue converges at once; without re-orthogonalisation copies of it would come back."""
    values = torch.cat([torch.tensor([1000.0]), torch.linspace(0, 1, 199)]).double()
    product, like = operator(symmetric(values))
    krylov = Krylov(product, 200, like, stream(0, "tests"))
    for _ in range(120):
        krylov.extend()
    torch.testing.assert_close(krylov.basis @ krylov.basis.T, torch.eye(120, dtype=torch.float64), rtol=0, atol=1e-13)
    found, _, _ = krylov.ritz()
    assert int((found > 2).sum()) == 1


MULTIPLE = torch.cat([torch.tensor([5.0, 5.0, 5.0, 3.0, 3.0, 2.0]), torch.linspace(-1, 1, 94)]).double()


def test_one_run_sees_each_multiple_eigenvalue_once_and_restarts_see_all() -> None:
    product, like = operator(symmetric(MULTIPLE))
    once, _ = extreme_eigenpairs(product, like, 3, steps=20)
    torch.testing.assert_close(once.values, torch.tensor([5.0, 3.0, 2.0]).double(), rtol=1e-8, atol=0)
    every, _ = extreme_eigenpairs(product, like, 6, multiplicity=True, tol=1e-6)
    torch.testing.assert_close(every.values, MULTIPLE[:6], rtol=1e-8, atol=0)
    torch.testing.assert_close(every.vectors @ every.vectors.T, torch.eye(6).double(), rtol=0, atol=1e-5)
    whole, _ = extreme_eigenpairs(product, like, 6, steps=100)
    torch.testing.assert_close(whole.values, MULTIPLE[:6], rtol=1e-8, atol=0)


def test_restarts_find_no_more_than_there_is() -> None:
    values = torch.cat([torch.tensor([5.0, 4.0, 3.0]), torch.linspace(-1, 1, 97)]).double()
    product, like = operator(symmetric(values))
    found, _ = extreme_eigenpairs(product, like, 3, multiplicity=True)
    torch.testing.assert_close(found.values, values[:3], rtol=1e-6, atol=0)


@pytest.mark.parametrize("values", [[2.0] * 5, [0.0] * 4, [3.0, 3.0, 0.0, 0.0, -1.0, -1.0]])
def test_exhausted_krylov_spaces_go_on(values: list[float]) -> None:
    model, data, _ = quadratic(values)
    found = analysis.curvature(model, data, k=len(values), loss=first)
    torch.testing.assert_close(found.eigenvalues, torch.tensor(values).double(), rtol=1e-12, atol=1e-12)


def test_convex_losses_have_an_infinite_convexity_ratio() -> None:
    found = analysis.curvature(nn.Linear(4, 3).double(), blobs(30), k=1, trace=False)
    assert found.convexity_ratio == math.inf and found.extremes[0] > 0 > found.extremes[1] - 1e-9
    assert math.isnan(found.sharpness_ratio)


def test_result_is_plain_and_can_be_drawn() -> None:
    found = analysis.curvature(network(), blobs(12), density=True, probes=3)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["eigenvalues"] == found.eigenvalues.tolist() and told["conditions"]["samples"] == 12
    assert told["convexity_ratio"] == found.convexity_ratio and "vectors" not in told
    assert len(found.plot().axes) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_looked_at_in_single_precision(dtype: torch.dtype) -> None:
    half = network().to(dtype)
    found = analysis.curvature(half, blobs(12), k=3, probes=2)
    exact = analysis.curvature(copy.deepcopy(half).float(), blobs(12), k=3, probes=2)
    assert torch.equal(found.eigenvalues, exact.eigenvalues) and found.conditions.dtype == "float32"
    assert half[0].weight.dtype == dtype


def test_workers_give_the_same_bits() -> None:
    one, two = (
        analysis.curvature(network(), blobs(30), k=3, probes=3, steps=12, workers=w, batch_size=4) for w in (1, 2)
    )
    assert torch.equal(one.eigenvalues, two.eigenvalues) and one.trace == two.trace
    assert torch.equal(one.vectors, two.vectors)
