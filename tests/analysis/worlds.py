"""Small problems with known answers."""

from __future__ import annotations

from typing import Any

import torch
from helpers import blobs, draws, flat, network
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

from fedflat.core import streams


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of the mean cross-entropy over the trainable parameters, entry by entry."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(vector: Tensor) -> Tensor:
        parts = torch.split(vector, [p.numel() for p in named.values()])
        weights = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, weights, (x,)), y)

    return jacrev(grad(loss))(torch.cat([p.reshape(-1) for p in named.values()]))


def small() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network of 43 parameters in double precision, data, and its Hessian."""
    model, (x, y) = network(), blobs(30)
    return model, x, y, dense_hessian(model, x, y)


def eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix).flip(0)


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues in random directions."""
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=draws(seed), dtype=torch.float64))
    return (q * values) @ q.T


class Quadratic(nn.Module):
    """½ wᵀAw whatever the input; use it with `first`."""

    def __init__(self, matrix: Tensor, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.w @ self.matrix @ self.w).expand(len(x))


def first(output: Tensor, y: Tensor) -> Tensor:
    return output.mean()


def quadratic(values: list[float]) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A quadratic with these eigenvalues, data it ignores, and its matrix."""
    matrix = symmetric(torch.tensor(values, dtype=torch.float64))
    start = torch.randn(len(values), generator=draws(1), dtype=torch.float64)
    return Quadratic(matrix, start), (torch.zeros(6, 1, dtype=torch.float64), torch.zeros(6)), matrix


def convnet(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A little of everything: convolution, BatchNorm with statistics, dropout, linear layers."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 4), nn.Tanh(),
        nn.Linear(4, 3),
    ).to(dtype)  # fmt: skip
    model(torch.randn(20, 1, 6, 6, dtype=dtype))  # running statistics of its own
    torch.set_rng_state(torch_state)
    return model


def images(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(count) % 3
    return torch.randn(count, 1, 6, 6, generator=draws(seed), dtype=dtype) + y[:, None, None, None], y


class Places(nn.Module):
    """Scores (batch, classes, places), as for a sequence: the same layer at every place."""

    def __init__(self) -> None:
        super().__init__()
        with streams.isolated(2, "tests"):
            self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).transpose(1, 2)


def places(count: int) -> tuple[Tensor, Tensor]:
    """So many sequences of five places, of which some have no label."""
    x, y = blobs(5 * count)
    labels = torch.where(torch.arange(5 * count) % 7 % 3 == 1, -100, y)
    return x.view(count, 5, 4), labels.view(count, 5)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything an analysis must leave alone."""
    named = dict(model.named_parameters())
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
        "requires": {name: p.requires_grad for name, p in named.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "places": {name: p.data_ptr() for name, p in named.items()},
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
    }


def unchanged(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(unchanged(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


__all__ = [
    "Places", "Quadratic", "blobs", "convnet", "dense_hessian", "draws", "eigenvalues", "first", "flat", "images",
    "network", "places", "quadratic", "small", "snapshot", "symmetric", "unchanged",
]  # fmt: skip
