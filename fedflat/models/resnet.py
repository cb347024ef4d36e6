"""Residual networks (He et al., 2016): the one class behind every variant.

Images of any size are accepted. A stage's output follows a ReLU, so it is never negative.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedflat.models.layers import Norm, ResidualBlock, Staged, conv, named


class ResNet(Staged):
    """A stem, stages of residual blocks, pooling, a classifier; a stage doubles the planes, halves the image.

    channels: of the images.
    depths: number of blocks in each stage.
    width: planes of the first stage; a bottleneck's output has four times its planes.
    stem: "imagenet" (7×7 at stride 2, then pooling at stride 2) or "cifar" (3×3 at stride 1).
    bias: of the classifier; convolutions never have one.
    projection: size of the output of MOON's two linear layers before the classifier; 0 for none.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        depths: Sequence[int],
        *,
        norm: Norm,
        width: int = 64,
        bottleneck: bool = False,
        stem: str = "cifar",
        bias: bool = True,
        projection: int = 0,
    ) -> None:
        super().__init__()
        self.stem = _stem(channels, width, norm, stem)
        expansion = 4 if bottleneck else 1
        inputs, stages = width, []
        for number, depth in enumerate(depths):
            planes, stride = width * 2**number, 1 if number == 0 else 2
            blocks = [_block(inputs, planes, stride, norm, bottleneck)]
            inputs = planes * expansion
            blocks += [_block(inputs, planes, 1, norm, bottleneck) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.add_stages(list(stages))
        self.head = _head(inputs, classes, bias, projection)


def _stem(channels: int, width: int, norm: Norm, kind: str) -> nn.Module:
    if kind == "cifar":
        return named(conv=conv(channels, width, 3), norm=norm(width), relu=nn.ReLU())
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return named(conv=conv(channels, width, 7, stride=2), norm=norm(width), relu=nn.ReLU(), pool=pool)


def _block(inputs: int, planes: int, stride: int, norm: Norm, bottleneck: bool) -> nn.Module:
    outputs = 4 * planes if bottleneck else planes
    branch = _bottleneck(inputs, planes, outputs, stride, norm) if bottleneck else _basic(inputs, outputs, stride, norm)
    shortcut: nn.Module = nn.Identity()
    if stride != 1 or inputs != outputs:
        shortcut = named(conv=conv(inputs, outputs, 1, stride), norm=norm(outputs))
    return ResidualBlock(branch, shortcut, after=nn.ReLU())


def _basic(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    return named(
        conv1=conv(inputs, outputs, 3, stride),
        norm1=norm(outputs),
        relu1=nn.ReLU(),
        conv2=conv(outputs, outputs, 3),
        norm2=norm(outputs),
    )


def _bottleneck(inputs: int, planes: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    return named(
        conv1=conv(inputs, planes, 1),
        norm1=norm(planes),
        relu1=nn.ReLU(),
        conv2=conv(planes, planes, 3, stride),
        norm2=norm(planes),
        relu2=nn.ReLU(),
        conv3=conv(planes, outputs, 1),
        norm3=norm(outputs),
    )


def _head(inputs: int, classes: int, bias: bool, projection: int) -> nn.Module:
    pool = nn.AdaptiveAvgPool2d(1)
    if not projection:
        return named(pool=pool, flatten=nn.Flatten(), classifier=nn.Linear(inputs, classes, bias))
    return named(
        pool=pool,
        flatten=nn.Flatten(),
        projection1=nn.Linear(inputs, inputs),
        relu=nn.ReLU(),
        projection2=nn.Linear(inputs, projection),
        classifier=nn.Linear(projection, classes, bias),
    )
