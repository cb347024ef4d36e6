"""Networks of several clients folded into one batch compute what `torch.vmap` computes, or are left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.flat import FlatModel
from fedflat.core.folded import UnknownFunctionError
from fedflat.core.stacked import StackedModel
from fedflat.tasks.losses import CrossEntropy, SquaredError, row_losses

CLIENTS, BATCH = 3, 5


class Views(nn.Module):
    """Reads the batch's size, as many networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class Twice(nn.Module):
    """One layer that is used two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


class Shared(nn.Module):
    """Two modules with the same weights, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(8, 8), nn.Linear(8, 2)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(x)))
        return out


FOLDING: dict[str, nn.Module] = {
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(288, 3)),
    "mlp": nn.Sequential(nn.Flatten(), nn.Linear(288, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)),
    "cnn": nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3), Views(), nn.Linear(64, 3)
    ),
    "strides, groups, dilation": nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, groups=2), nn.Conv2d(6, 4, 2, dilation=2, bias=False), Views(), nn.Linear(36, 3)
    ),
    "norms": nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), Views(), nn.Linear(600, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    ),
    "dropout": nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.4), Views(), nn.Dropout(0.5), nn.Linear(400, 3)),
    "used twice": nn.Sequential(nn.Flatten(), nn.Linear(288, 8), Twice(), nn.Linear(8, 3)),
    "shared": nn.Sequential(nn.Flatten(), nn.Linear(288, 8), Shared(), nn.Linear(8, 3)),
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS, BATCH, 2, 12, 12, generator=source, dtype=dtype)
    y = torch.randint(3, (CLIENTS, BATCH), generator=source)
    y[0, 3:] = -100
    return x, y


def stacked(module: nn.Module, folds: bool, dtype: torch.dtype = torch.float64) -> StackedModel:
    """Clients with different weights, and gradients that are still those of another step."""

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(CLIENTS)]

    model = StackedModel(FlatModel(module, dtype), generators, CLIENTS, folds)
    model.theta.mul_(torch.linspace(0.5, 1.5, CLIENTS, dtype=dtype).unsqueeze(1))
    model.grad.fill_(7.0)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FOLDING)
def test_outputs_and_gradients_are_those_of_vmap(name: str, dtype: torch.dtype) -> None:
    x, y = inputs(dtype)
    close = 1e-12 if dtype == torch.float64 else 1e-5
    found: list[tuple[Tensor, Tensor]] = []
    for folds in (False, True):
        model = stacked(FOLDING[name], folds, dtype)
        output = model(x)
        model.backpropagate(row_losses(F.cross_entropy)(output, y))
        found.append((output.detach(), model.grad))
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


def test_weights_that_are_not_trained_now_have_no_gradient() -> None:
    x, y = inputs()
    model = stacked(FOLDING["mlp"], folds=True)
    with model.restricted(model.mask("3")):
        model.backpropagate(row_losses(F.cross_entropy)(model(x), y))
    touched = model.mask("3").bool()
    assert model.grad[:, touched].any(1).all() and not model.grad[:, ~touched].any()


def test_the_module_has_its_own_weights_again_after_a_pass() -> None:
    model = stacked(FOLDING["shared"], folds=True)
    before = {name: id(p) for name, p in model.module.named_parameters(remove_duplicate=False)}
    model(inputs()[0])
    assert {name: id(p) for name, p in model.module.named_parameters(remove_duplicate=False)} == before


def test_a_function_of_weights_without_a_rule_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = stacked(nn.Sequential(nn.Flatten(), nn.Linear(288, 3), Scaled()), folds=True)
    with pytest.raises(UnknownFunctionError, match="mul"):
        model(inputs()[0])


@pytest.mark.parametrize(
    "criterion", [F.cross_entropy, CrossEntropy(), CrossEntropy(label_smoothing=0.1), SquaredError()]
)
@pytest.mark.parametrize("heads", [1, 2])
def test_losses_of_rows_are_those_of_each_row(criterion: Any, heads: int) -> None:
    x, y = inputs()
    output = x.flatten(2)[..., :21].reshape(CLIENTS, BATCH, 3, 7)
    target = y.unsqueeze(2).expand(-1, -1, 7)
    if isinstance(criterion, SquaredError):
        target = output.square()
    if heads == 2 and not isinstance(criterion, CrossEntropy):
        return
    outputs: Any = output if heads == 1 else (output, output**2)
    rows = row_losses(criterion)(outputs, target)
    for i, row in enumerate(rows):
        own = output[i] if heads == 1 else (output[i], output[i] ** 2)
        torch.testing.assert_close(row, criterion(own, target[i]), rtol=1e-12, atol=1e-12)


def test_the_model_of_the_first_clients_has_their_rows() -> None:
    """As if the others were not there: their gradients stay as they are."""
    x, y = inputs()
    whole, other = (stacked(FOLDING["mlp"], folds=True) for _ in range(2))
    losses = row_losses(F.cross_entropy)(whole(x), y)
    whole.backpropagate(losses)
    before, two = other.grad[2].clone(), other.first(2)
    some = row_losses(F.cross_entropy)(two(x[:2]), y[:2])
    two.backpropagate(some)
    torch.testing.assert_close(some, losses[:2])
    torch.testing.assert_close(other.grad[:2], whole.grad[:2])
    assert torch.equal(other.grad[2], before)
    assert other.first(3) is other
