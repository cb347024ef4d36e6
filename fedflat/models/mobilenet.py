"""MobileNetV2 (Sandler et al., 2018): inverted residuals with linear bottlenecks.

Its activations are `nn.ReLU6`. Its stages end in a linear layer: their outputs have both signs.
"""

from __future__ import annotations

from torch import nn

from fedflat.models.checks import image_shape
from fedflat.models.layers import Norm, ResidualBlock, Staged, conv, init_fan_out, named, norm_layer

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, number of blocks and first stride of each stage (table 2 of the paper)."""


class MobileNetV2(Staged):
    """MobileNetV2 of width 1 for images of any size (made for 224×224; divides height and width by 32)."""

    def __init__(self, channels: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = named(conv=conv(channels, 32, 3, stride=2), norm=norm(32), relu=nn.ReLU6())
        inputs, stages = 32, []
        for expansion, outputs, blocks, stride in STAGES:
            first = _block(inputs, outputs, stride, expansion, norm)
            rest = (_block(outputs, outputs, 1, expansion, norm) for _ in range(blocks - 1))
            stages.append(nn.Sequential(first, *rest))
            inputs = outputs
        self.add_stages(list(stages))
        self.head = named(
            conv=conv(inputs, 1280, 1),
            norm=norm(1280),
            relu=nn.ReLU6(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(1280, classes),
        )


def _block(inputs: int, outputs: int, stride: int, expansion: int, norm: Norm) -> nn.Module:
    inner = inputs * expansion
    layers: dict[str, nn.Module] = {}
    if expansion != 1:
        layers = {"conv1": conv(inputs, inner, 1), "norm1": norm(inner), "relu1": nn.ReLU6()}
    layers |= {
        "conv2": conv(inner, inner, 3, stride, groups=inner),
        "norm2": norm(inner),
        "relu2": nn.ReLU6(),
    }
    layers |= {"conv3": conv(inner, outputs, 1), "norm3": norm(outputs)}
    if stride != 1 or inputs != outputs:
        return named(**layers)
    return ResidualBlock(named(**layers), shortcut=nn.Identity(), after=nn.Identity())


def mobilenetv2(shape: tuple[int, ...], classes: int, norm: str = "gn", groups: int = 8) -> nn.Module:
    """MobileNetV2 with GroupNorm, of the paper on FedSAM with SWA (Landmarks; 2028 classes: 4 821 740).

    norm: "gn" (GroupNorm of `groups` groups in every layer), "bn", "bn_nostats" or "none".
    Differs from the paper in starting from random weights (there: trained on ImageNet); no dropout.
    """
    net = MobileNetV2(image_shape("mobilenetv2", shape)[0], classes, norm_layer("mobilenetv2", norm, groups))
    nn.init.normal_(net.get_parameter("head.classifier.weight"), std=0.01)
    nn.init.zeros_(net.get_parameter("head.classifier.bias"))
    return init_fan_out(net)
