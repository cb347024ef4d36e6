"""Every network on a make-believe device: the CPU's bits, and no operation without a deterministic CUDA kernel."""

from __future__ import annotations

import warnings

import pytest
import torch
from make_believe import KIND, on_make_believe

from fedflat.core import streams
from fedflat.core.flat import FlatModel
from fedflat.models import MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
@on_make_believe
def test_gradients_on_a_device_have_the_bits_of_the_cpu_and_are_deterministic(name: str) -> None:
    device, generator = torch.device("gpu:0"), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 32, 32, generator=generator), torch.tensor([0, 4])
    if name.startswith("char"):
        x = torch.arange(16).view(2, 8) % 5
    with streams.isolated(0, "models"):
        model = FlatModel(build_model(name, tuple(x.shape[1:]), 5))
    KIND.prepare(device, "float32")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (model, model.on(device)):
            with streams.isolated(0, "dropout"):
                where = each.theta.device
                output = each(x.to(where))
                if isinstance(output, tuple):  # a network of pixels with auxiliary heads
                    sum(head.square().mean() for head in output).backward()
                else:
                    torch.nn.functional.cross_entropy(output, y.to(where)).backward()
            found.append((each.grad.cpu(), each.buffers.cpu()))
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))
