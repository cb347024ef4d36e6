"""BiSeNetV2 (Yu et al., 2021) for semantic segmentation, as FedDrive uses it: with pixel-shuffle heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedflat.errors import InputError
from fedflat.models.checks import image_shape, whole

EXPANSION = 6


def _unit(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """Convolution without bias, BatchNorm and, if wanted, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([nn.ReLU()] if relu else []))


class Gather(nn.Module):
    """Gather and expand: 3×3, depthwise to six times the channels, 1×1 back, with a shortcut around."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * inputs
        first = _unit(inputs, inputs)
        if stride == 1:
            inner = [_unit(inputs, wide, groups=inputs)]
        else:
            inner = [_unit(inputs, wide, stride=2, groups=inputs, relu=False), _unit(wide, wide, groups=wide)]
        self.body = nn.Sequential(first, *inner, _unit(wide, outputs, kernel=1, relu=False))
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            down = _unit(inputs, inputs, stride=2, groups=inputs, relu=False)
            self.shortcut = nn.Sequential(down, _unit(inputs, outputs, kernel=1, relu=False))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Half the size where the stride is 2."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class Stem(nn.Module):
    """A quarter of the size, by a convolution and by pooling side by side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _unit(3, channels, stride=2)
        half = channels // 2
        self.left = nn.Sequential(_unit(channels, half, kernel=1), _unit(half, channels, stride=2))
        self.right = nn.MaxPool2d(3, 2, 1)
        self.fuse = _unit(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """A quarter of the size."""
        x = self.conv(x)
        out: Tensor = self.fuse(torch.cat([self.left(x), self.right(x)], dim=1))
        return out


class Context(nn.Module):
    """The mean over the image, added to every place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv, self.last = (
            nn.BatchNorm2d(channels),
            _unit(channels, channels, kernel=1),
            _unit(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = self.last(x + self.conv(self.norm(x.mean(dim=(2, 3), keepdim=True))))
        return out


class Aggregation(nn.Module):
    """Each branch weighs the other, and both are added."""

    def __init__(self, channels: int) -> None:
        super().__init__()

        def light() -> nn.Sequential:
            point = nn.Conv2d(channels, channels, 1, bias=False)
            return nn.Sequential(*_unit(channels, channels, groups=channels, relu=False), point)

        self.left1, self.right2 = light(), light()
        self.left2 = nn.Sequential(*_unit(channels, channels, stride=2, relu=False), nn.AvgPool2d(3, 2, 1))
        self.right1 = _unit(channels, channels, relu=False)
        self.up1, self.up2 = nn.Upsample(scale_factor=4), nn.Upsample(scale_factor=4)
        self.last = _unit(channels, channels)

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        """The shape of `detail`, of which `semantic` has a quarter of the size."""
        left = self.left1(detail) * self.up1(self.right1(semantic)).sigmoid()
        right = self.up2(self.left2(detail) * self.right2(semantic).sigmoid())
        out: Tensor = self.last(left + right)
        return out


def _head(inputs: int, middle: int, classes: int, factor: int) -> nn.Sequential:
    last = nn.Conv2d(middle, classes * factor**2, 1)
    return nn.Sequential(_unit(inputs, middle), nn.Dropout(0.1), last, nn.PixelShuffle(factor))


class BiSeNetV2(nn.Module):
    """Two branches, detail and semantic. In training the output is a tuple: the main head, then the auxiliary ones."""

    def __init__(self, classes: int, width: float, head: int, aux_head: int, aux: bool) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return max(4, 4 * round(channels * width / 4))

        a, b = scaled(64), scaled(128)
        c16, c32, c64 = scaled(16), scaled(32), a
        self.detail = nn.Sequential(
            *(_unit(3, a, stride=2), _unit(a, a)),
            *(_unit(a, a, stride=2), _unit(a, a), _unit(a, a)),
            *(_unit(a, b, stride=2), _unit(b, b), _unit(b, b)),
        )
        self.stem = Stem(c16)
        self.stage3 = nn.Sequential(Gather(c16, c32, 2), Gather(c32, c32, 1))
        self.stage4 = nn.Sequential(Gather(c32, c64, 2), Gather(c64, c64, 1))
        self.stage5 = nn.Sequential(Gather(c64, b, 2), *(Gather(b, b, 1) for _ in range(3)))
        self.context, self.aggregation = Context(b), Aggregation(b)
        self.head = _head(b, head, classes, 8)
        sizes = zip((c16, c32, c64, b), (4, 8, 16, 32), strict=True)
        self.aux = nn.ModuleList(_head(channels, aux_head, classes, factor) for channels, factor in sizes if aux)
        self._initialise()

    def _initialise(self) -> None:
        """Kaiming's for convolutions; the last BatchNorm of a gathering block starts at 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, Gather):
                last = module.body[-1]
                assert isinstance(last, nn.Sequential) and isinstance(last[1], nn.BatchNorm2d)
                nn.init.zeros_(last[1].weight)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Scores (batch, classes, height, width); in training with those of the auxiliary heads."""
        height, width = x.shape[-2:]
        stem = self.stem(x)
        third = self.stage3(stem)
        fourth = self.stage4(third)
        fifth = self.stage5(fourth)
        out: Tensor = self.head(self.aggregation(self.detail(x), self.context(fifth)))[..., :height, :width]
        if not (self.training and len(self.aux)):
            return out
        others = zip(self.aux, (stem, third, fourth, fifth), strict=True)
        return out, *(head(features)[..., :height, :width] for head, features in others)


def bisenetv2(
    shape: tuple[int, ...], classes: int, width: float = 1.0, head: int = 1024, aux_head: int = 128, aux: bool = True
) -> nn.Module:
    """BiSeNetV2 for segmentation, as in FedDrive (19 classes: 8 196 416 parameters, 4 585 552 without auxiliary heads).

    width: factor of all channel counts, rounded to multiples of 4. head, aux_head: channels inside the heads. aux: four
    auxiliary heads, in training only. For minutes on a CPU: width=0.5, head=128, aux=False.
    """
    channels, height, across = image_shape("bisenetv2", shape, 32)
    if channels != 3 or height % 32 or across % 32:
        raise InputError(f"model 'bisenetv2' takes colour images whose sides are multiples of 32, not {tuple(shape)}")
    if not width > 0:
        raise InputError(f"model 'bisenetv2': width must be above 0, not {width}")
    sizes = whole("bisenetv2", "head", head), whole("bisenetv2", "aux_head", aux_head)
    return BiSeNetV2(classes, width, *sizes, aux)
