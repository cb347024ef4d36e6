"""Models and data of a device are analysed as those of the CPU are, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import blobs, restless
from make_believe import on_make_believe
from torch import nn

import fedflat
from fedflat import analysis

ANALYSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "curvature": lambda net, data: analysis.curvature(net, data, k=2, density=True),
    "layer curvature": lambda net, data: analysis.layer_curvature(net, data),
    "hessian trace": lambda net, data: analysis.hessian_trace(net, data),
    "signal": lambda net, data: analysis.gsnr(net, data),
    "gradient variance": lambda net, data: analysis.gradient_variance(net, data, batch_size=10),
    "features": lambda net, data: analysis.feature_norm(net, data),
    "calibration": lambda net, data: analysis.calibration(net, data),
    "landscape": lambda net, data: analysis.landscape_2d(net, data, points=3),
    "noise": lambda net, data: analysis.noise_curve(net, data),
}


@pytest.mark.parametrize("name", ANALYSES)
@on_make_believe
def test_a_model_and_data_on_a_device_are_analysed_as_on_the_cpu(name: str) -> None:
    net, data = restless().float().eval(), blobs(30)
    here = ANALYSES[name](net, data)
    there = ANALYSES[name](net.to("gpu:1"), tuple(tensor.to("gpu:1") for tensor in data))
    assert str(there) == str(here)


@on_make_believe
def test_clients_are_watched_on_their_device() -> None:
    from helpers import plain, world

    watch = ["drift", "gsnr", "client_curvature", "feature_norms"]
    runs = [
        fedflat.run(plain(dtype="float32", device=device), federation=world(), model=restless(), watch=watch)
        for device in ("cpu", "gpu:0,gpu:1")
    ]
    columns = ("cosine", "norm", "gsnr_sum", "lambda_max", "feature_norm")
    left, right = ([[row[name] for name in columns] for row in run.clients] for run in runs)
    assert left == right
    assert torch.equal(runs[0].weights, runs[1].weights)
