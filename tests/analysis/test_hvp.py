"""Hessian products against dense Hessians and closed forms, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from analysis.worlds import (
    Places,
    blobs,
    convnet,
    dense_hessian,
    draws,
    eigenvalues,
    first,
    images,
    network,
    places,
    quadratic,
    small,
)
from fedflat import InputError, analysis
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.problem import Protocol, opened


def vector(size: int, seed: int = 5) -> Tensor:
    return torch.randn(size, generator=draws(seed), dtype=torch.float64)


def test_product_is_that_of_the_dense_hessian() -> None:
    model, x, y, dense = small()
    torch.testing.assert_close(
        analysis.hessian_product(model, (x, y), vector(43)), dense @ vector(43), rtol=1e-11, atol=1e-13
    )


def test_convolutions_and_running_statistics() -> None:
    model, (x, y) = convnet().train(), images(10)
    dense = dense_hessian(convnet().eval(), x, y)
    v = vector(len(dense))
    torch.testing.assert_close(analysis.hessian_product(model, (x, y), v), dense @ v, rtol=1e-10, atol=1e-13)


def test_product_is_symmetric() -> None:
    model, data = convnet(), images(10)
    u, v = vector(247, 1), vector(247, 2)
    left, right = u @ analysis.hessian_product(model, data, v), v @ analysis.hessian_product(model, data, u)
    assert float(left) == pytest.approx(float(right), rel=1e-11)


def test_constants_have_no_rows() -> None:
    model, x, y, dense = small()
    model[0].requires_grad_(False)
    torch.testing.assert_close(analysis.hessian_product(model, (x, y), vector(18)), dense[25:, 25:] @ vector(18))


@pytest.mark.parametrize("size", [1, 4, 7, 30])
def test_batch_size_does_not_matter(size: int) -> None:
    model, x, y, dense = small()
    found = analysis.hessian_product(model, (x, y), vector(43), batch_size=size)
    torch.testing.assert_close(found, dense @ vector(43), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [2, 5, 12])
def test_labels_to_be_ignored_have_no_share_in_the_mean(size: int) -> None:
    """Cross-entropy is a mean over the labels that count, of which batches have different numbers."""
    model, (x, y) = Places(), places(12)
    dense = dense_hessian(model, x, y)
    found = analysis.hessian_product(model, (x, y), vector(15), batch_size=size)
    torch.testing.assert_close(found, dense @ vector(15), rtol=1e-11, atol=1e-13)


def test_workers_and_memory_do_not_change_a_bit() -> None:
    model, data = convnet(torch.float32), images(40, torch.float32)
    results = [
        analysis.hessian_product(model, data, vector(247).float(), batch_size=3, **options)
        for options in ({}, {"workers": 2}, {"workers": 3}, {"memory": 1e-6}, {"workers": 2, "memory": 1e-4})
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_kept_graphs_stay_within_the_memory_allowed() -> None:
    data = images(64)
    with opened(convnet(), data, Protocol(batch_size=4)) as problem:
        room = 6.5 * 4 * problem.sample_bytes()
    with opened(convnet(), data, Protocol(memory=room / 2**30, batch_size=4)) as problem, Hessian(problem) as hessian:
        hessian(vector(hessian.size))
        assert len(hessian._graphs) == 4  # two more are the room of the one in work


@pytest.mark.parametrize("size", [1, 3])
def test_a_sample_takes_memory_in_small_batches_too(size: int) -> None:
    with (
        opened(convnet(), images(12), Protocol(batch_size=12)) as one,
        opened(convnet(), images(12), Protocol(batch_size=size)) as other,
    ):
        assert other.sample_bytes() >= one.sample_bytes() > 1000


def test_memory_sets_the_batch_size() -> None:
    with opened(convnet(), images(64), Protocol(memory=1e-4)) as problem:
        largest = max(len(y) for _, y in problem.batches)
        assert 8 * largest * problem.sample_bytes() <= 1e-4 * 2**30


def test_quadratic_is_its_matrix() -> None:
    model, data, matrix = quadratic([4.0, 1.0, 0.5, -2.0])
    torch.testing.assert_close(analysis.hessian_product(model, data, vector(4), loss=first), matrix @ vector(4))
    found = analysis.curvature(model, data, k=4, loss=first)
    torch.testing.assert_close(found.eigenvalues, eigenvalues(matrix), rtol=1e-8, atol=0)


def test_softmax_regression() -> None:
    """H = mean of (diag p − ppᵀ) ⊗ xxᵀ."""
    x, y = blobs(20)
    model = nn.Linear(4, 3, bias=False).double()
    p = model(x).softmax(1).detach()
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nij,na,nb->iajb", blocks, x, x).reshape(12, 12) / len(x)
    found = torch.stack([analysis.hessian_product(model, (x, y), row) for row in torch.eye(12, dtype=torch.float64)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_linear_losses_have_no_curvature() -> None:
    model, data = nn.Linear(4, 3).double(), blobs(9)
    found = analysis.curvature(model, data, k=2, loss=lambda output, y: output.mean())
    assert found.eigenvalues.tolist() == [0.0, 0.0] and found.trace == 0.0


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g * 2


def test_models_without_a_second_derivative_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(self.inner(x))

    with pytest.raises(InputError, match="cannot be differentiated twice"):
        analysis.hessian_trace(Model(), blobs(9), probes=1)


def test_worker_errors_are_errors_here() -> None:
    """A loss that turns infinite only in the second derivative is found in a worker and told here."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.zero_()
    data = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4)
    with pytest.raises(InputError, match="not finite"):
        analysis.hessian_trace(
            model, data, probes=1, loss=lambda o, y: (o.abs() ** 1.5).mean(), workers=2, batch_size=1
        )
