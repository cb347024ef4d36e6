"""The papers' networks, by name: `build_model("resnet18_gn(stem='cifar')", (3, 32, 32), 10)`.

A network is an ordinary `nn.Module` from a batch of inputs to class scores. Every ReLU is a module of its
own, used once in a forward pass; the classifier is the last `nn.Linear`. Networks of stages are `Staged`,
residual ones are built of `ResidualBlock`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedflat import specs
from fedflat.models.bisenet import bisenetv2
from fedflat.models.checks import whole
from fedflat.models.cnn import cnn64, cnn_femnist, cnn_tiny, lenet5
from fedflat.models.layers import ResidualBlock, Staged
from fedflat.models.mobilenet import mobilenetv2
from fedflat.models.resnet_variants import (
    resnet18,
    resnet18_bn_nostats,
    resnet18_gn,
    resnet18_imagenet,
    resnet18_nonorm,
    resnet50,
    resnet50_gn,
    resnet56,
)
from fedflat.models.simple import logistic, mlp
from fedflat.models.text import char_lstm, char_transformer
from fedflat.models.wide import wrn28_10, wrn28_10_gn

__all__ = ["MODELS", "ResidualBlock", "Staged", "build_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "bisenetv2": bisenetv2,
    "char_lstm": char_lstm,
    "char_transformer": char_transformer,
    "cnn64": cnn64,
    "cnn_femnist": cnn_femnist,
    "cnn_tiny": cnn_tiny,
    "lenet5": lenet5,
    "logistic": logistic,
    "mlp": mlp,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "resnet18_bn_nostats": resnet18_bn_nostats,
    "resnet18_gn": resnet18_gn,
    "resnet18_imagenet": resnet18_imagenet,
    "resnet18_nonorm": resnet18_nonorm,
    "resnet50": resnet50,
    "resnet50_gn": resnet50_gn,
    "resnet56": resnet56,
    "resnet56_fedml": resnet56,
    "wrn28_10": wrn28_10,
    "wrn28_10_gn": wrn28_10_gn,
}
"""Every network by name, as a function of the shape of an input, the number of classes, and its options."""


def build_model(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network that `text` names, such as `"lenet5(bias=True)"`, freshly initialised.

    shape: of one input, without the batch dimension: (channels, height, width) for images.
    classes: number of outputs.
    Weights come from PyTorch's global generator; call this inside `streams.isolated` to have them by a seed.

    >>> build_model("mlp(hidden=(8, 8))", (1, 28, 28), 10)[-1]
    Linear(in_features=8, out_features=10, bias=True)
    """
    call = specs.parse(text)
    return specs.build("model", call, MODELS, shape, whole(call.name, "classes", classes))
