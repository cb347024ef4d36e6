"""The cheaper order of ReLU and pooling has the bits of the usual one, and steps back where somebody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedflat.core.flat import FlatModel
from fedflat.core.pool_first import PoolFirst

POOLS: list[Callable[[], nn.Module]] = [
    lambda: nn.MaxPool2d(2),
    lambda: nn.MaxPool2d(3, stride=2, padding=1),  # windows that overlap
    lambda: nn.MaxPool2d(2, ceil_mode=True),
]


def _grad_of(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    output = function(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", POOLS)
def test_output_and_gradient_have_the_bits_of_a_relu_before_the_pool(
    pool: Callable[[], nn.Module], layout: torch.memory_format
) -> None:
    values = torch.randint(
        -3, 3, (5, 6, 9, 9), generator=torch.Generator().manual_seed(0)
    )  # many ties, many windows ≤ 0
    x = values.float().contiguous(memory_format=layout)
    got, expected = _grad_of(PoolFirst(nn.ReLU(), pool()), x), _grad_of(nn.Sequential(nn.ReLU(), pool()), x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert (expected[1] != 0).any() and (expected[0] == 0).any()


def test_a_number_that_is_none_passes_both() -> None:
    x = torch.full((1, 1, 2, 2), -1.0)
    x[0, 0, 1, 1] = torch.nan
    assert PoolFirst(nn.ReLU(), nn.MaxPool2d(2))(x).isnan().all()


def test_a_hook_sees_the_activation_before_the_pool() -> None:
    layer, seen = PoolFirst(nn.ReLU(), nn.MaxPool2d(2)), list[Tensor]()
    handle = layer[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    layer(torch.randn(2, 3, 8, 8))
    handle.remove()
    layer(torch.randn(2, 3, 8, 8))
    assert [tuple(output.shape) for output in seen] == [(2, 3, 8, 8)]


def test_networks_are_trained_in_this_order_and_exported_as_they_were_written() -> None:
    """Chains within chains, with the names of their tensors; other activations and other poolings stay."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    other = nn.Sequential(nn.Tanh(), nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.ReLU())
    written = nn.Sequential(stage, other, nn.Flatten(), nn.Linear(16, 2))
    model = FlatModel(written)
    kinds = [type(module) for module in model.module.modules() if isinstance(module, nn.Sequential)]
    assert kinds == [nn.Sequential, PoolFirst, nn.Sequential]
    assert [name for name, _ in model.module.named_modules()] == [name for name, _ in written.named_modules()]
    exported = model.export(model.theta, model.buffers, model.counters)
    assert PoolFirst not in map(type, exported.modules()) and PoolFirst not in map(type, written.modules())
    x = torch.randn(5, 3, 18, 18)
    assert torch.allclose(model(x), written(x), atol=1e-6) and torch.equal(exported(x), written.eval()(x))


def test_a_mode_that_sees_functions_sees_the_activation_before_the_pool() -> None:
    seen = list[Tensor]()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if func is torch.relu or getattr(func, "__name__", "") == "relu":
                seen.append(output)
            return output

    with Watch():
        PoolFirst(nn.ReLU(), nn.MaxPool2d(2))(torch.randn(2, 3, 8, 8))
    assert {tuple(output.shape) for output in seen} == {(2, 3, 8, 8)}
