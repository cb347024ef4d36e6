"""What the networks are made of: convolutions, normalisations, residual blocks, stages, initialisations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fedflat.errors import InputError
from fedflat.models.checks import one_of, whole

Norm: TypeAlias = Callable[[int], nn.Module]
"""Makes the normalisation of so many channels."""


def named(**layers: nn.Module) -> nn.Sequential:
    """A chain of layers whose parameters are called by the keywords (`conv1.weight`)."""
    return nn.Sequential(OrderedDict(layers))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size of the image (at stride 1)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def norm_layer(model: str, kind: str, groups: int = 2) -> Norm:
    """The normalisation called `kind`.

    kind: "bn" (BatchNorm), "bn_nostats" (BatchNorm that always uses the batch and keeps no statistics),
        "gn" (GroupNorm, `groups` groups in every layer) or "none".
    model: named in errors.
    """
    kinds: dict[str, Norm] = {
        "bn": nn.BatchNorm2d,
        "bn_nostats": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
        "gn": lambda channels: _group_norm(model, groups, channels),
        "none": lambda channels: nn.Identity(),
    }
    return kinds[one_of(model, "norm", kind, kinds)]


def _group_norm(model: str, groups: int, channels: int) -> nn.Module:
    if channels % whole(model, "groups", groups):
        raise InputError(
            f"model {model!r}: a layer of {channels} channels cannot be divided into groups={groups}; "
            f"choose a divisor of {channels}"
        )
    return nn.GroupNorm(groups, channels)


class ResidualBlock(nn.Module):
    """`after(branch(h) + shortcut(h))` with `h = before(x)`: the block of every residual network here.

    branch: the residual function.
    shortcut: the identity, or the projection of a block that changes the shape.
    after: a ReLU; nothing in pre-activation and inverted residual blocks, where no ReLU follows the sum.
    before: the normalisation and ReLU that the branch and a projection share in a pre-activation block that
        changes the shape; nothing elsewhere.

    Two attributes are for stochastic depth. `survival`: the probability that training evaluates the branch, and the
    factor of the branch in evaluation; 1 is the plain block. `dropped`: whether training leaves the branch out; None
    has every training pass decide by a draw from PyTorch's global generator, as `nn.Dropout` does.
    """

    survival: float = 1.0
    dropped: bool | None = None

    def __init__(
        self,
        branch: nn.Module,
        shortcut: nn.Module,
        after: nn.Module,
        before: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.before = nn.Identity() if before is None else before
        self.branch = branch
        self.shortcut = shortcut
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of feature maps."""
        x = self.before(x)
        out: Tensor = self.after(self.shortcut(x) if self._drops() else self._scaled(self.branch(x)) + self.shortcut(x))
        return out

    def _drops(self) -> bool:
        if self.survival == 1 or not self.training:
            return False
        return torch.rand(()).item() >= self.survival if self.dropped is None else self.dropped

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.survival == 1 or self.training else branch * self.survival


class Staged(nn.Module):
    """A network that reads images as `stem`, then each of its stages, then `head`; what a subclass fills.

    stages: names of the stages' submodules, first to last. A stage can be called alone on what enters it.
    The classifier is the last `nn.Linear`; what enters it are the penultimate features.
    """

    stages: tuple[str, ...]
    stem: nn.Module
    head: nn.Module

    def add_stages(self, stages: list[nn.Module]) -> None:
        """Register the stages as `layer1`, `layer2`, … and declare them."""
        self.stages = tuple(f"layer{number}" for number in range(1, len(stages) + 1))
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (batch, classes) of images (batch, channels, height, width)."""
        x = self.stem(x)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        out: Tensor = self.head(x)
        return out


def init_fan_out(model: nn.Module) -> nn.Module:
    """Convolutions by Kaiming's normal law, fan-out; the rest stays as PyTorch made it. Returns `model`."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def init_he(model: nn.Module) -> nn.Module:
    """Convolutions and linear layers by He's normal law, fan-in; biases zero. Returns `model`."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
