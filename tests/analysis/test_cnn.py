"""A convolutional network of 34 thousand parameters in single precision against an independent double computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.worlds import draws
from fedflat import analysis
from fedflat.core import streams

WIDTH = 10  # vectors that are iterated together


def network() -> nn.Module:
    with streams.isolated(1, "tests"):
        return nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 56), nn.ReLU(), nn.Linear(56, 10),
        )  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    y = torch.arange(40) % 10
    kinds = torch.randn(10, 1, 14, 14, generator=draws(1))
    return kinds[y] + 0.5 * torch.randn(40, 1, 14, 14, generator=draws(2)), y


def trained() -> nn.Module:
    model, (x, y) = network(), data()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def products(model: nn.Module, x: Tensor, y: Tensor, block: Tensor) -> Tensor:
    """Hessian products of the columns, from central differences of the gradient in double precision."""
    parameters = list(model.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach().clone()
    columns = []
    for column in block.T:
        ends = []
        for sign in (1, -1):
            nn.utils.vector_to_parameters(start + sign * 1e-6 * column, parameters)
            gradient = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
            ends.append(torch.cat([g.reshape(-1) for g in gradient]))
        columns.append((ends[0] - ends[1]) / 2e-6)
    nn.utils.vector_to_parameters(start, parameters)
    return torch.stack(columns, 1)


def subspace_eigenvalues(model: nn.Module, x: Tensor, y: Tensor, rounds: int) -> Tensor:
    """Largest eigenvalues by subspace iteration with Rayleigh and Ritz."""
    size = sum(p.numel() for p in model.parameters())
    block = torch.linalg.qr(torch.randn(size, WIDTH, generator=draws(3), dtype=torch.float64))[0]
    for _ in range(rounds):
        block = torch.linalg.qr(products(model, x, y, block))[0]
    return torch.linalg.eigvalsh(block.T @ products(model, x, y, block)).flip(0)


def test_single_precision_agrees_with_double() -> None:
    model, (x, y) = trained(), data()
    assert 34_000 <= sum(p.numel() for p in model.parameters()) < 35_000
    found = analysis.curvature(model, (x, y), k=5, trace=False)
    assert found.conditions.dtype == "float32"
    expected = subspace_eigenvalues(copy.deepcopy(model).double(), x.double(), y, rounds=8)
    assert found.eigenvalues[:2].tolist() == pytest.approx(expected[:2].tolist(), rel=1e-3)
    assert float(found.residuals.max()) <= 1e-3 * float(found.eigenvalues[0])
