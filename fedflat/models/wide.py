"""Wide residual networks (Zagoruyko and Komodakis, 2016), pre-activated: no ReLU follows a block's sum.

A stage's output is therefore a plain sum; the normalisation and ReLU that close the network are in its head.
"""

from __future__ import annotations

from torch import nn

from fedflat.models.checks import image_shape
from fedflat.models.layers import Norm, ResidualBlock, Staged, conv, init_fan_out, named, norm_layer


class WideResNet(Staged):
    """Three stages of `blocks` pre-activated blocks with 16, 32 and 64 times `widen` channels.

    channels: of the images, which may have any size.
    """

    def __init__(self, channels: int, classes: int, blocks: int, widen: int, norm: Norm) -> None:
        super().__init__()
        self.stem = named(conv=conv(channels, 16, 3))
        inputs, stages = 16, []
        for outputs, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            first = _block(inputs, outputs, stride, norm)
            stages.append(nn.Sequential(first, *(_block(outputs, outputs, 1, norm) for _ in range(blocks - 1))))
            inputs = outputs
        self.add_stages(list(stages))
        self.head = named(
            norm=norm(inputs),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(inputs, classes),
        )


def _block(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    first = {"norm1": norm(inputs), "relu1": nn.ReLU()}
    convolutions = {
        "conv1": conv(inputs, outputs, 3, stride),
        "norm2": norm(outputs),
        "relu2": nn.ReLU(),
        "conv2": conv(outputs, outputs, 3),
    }
    if inputs == outputs and stride == 1:
        return ResidualBlock(named(**first, **convolutions), shortcut=nn.Identity(), after=nn.Identity())
    projection = named(conv=conv(inputs, outputs, 1, stride))
    return ResidualBlock(named(**convolutions), projection, after=nn.Identity(), before=named(**first))


def _wrn28_10(model: str, shape: tuple[int, ...], classes: int, norm: Norm) -> nn.Module:
    net = WideResNet(image_shape(model, shape)[0], classes, blocks=4, widen=10, norm=norm)
    nn.init.zeros_(net.get_parameter("head.classifier.bias"))
    return init_fan_out(net)


def wrn28_10(shape: tuple[int, ...], classes: int) -> nn.Module:
    """WRN-28-10 with BatchNorm and without dropout (36 536 884 parameters for 100 classes)."""
    return _wrn28_10("wrn28_10", shape, classes, norm_layer("wrn28_10", "bn"))


def wrn28_10_gn(shape: tuple[int, ...], classes: int, groups: int = 2) -> nn.Module:
    """WRN-28-10 with GroupNorm, of the paper on PLGU (CIFAR-100).

    groups: number of groups in every layer.
    """
    return _wrn28_10("wrn28_10_gn", shape, classes, norm_layer("wrn28_10_gn", "gn", groups))
