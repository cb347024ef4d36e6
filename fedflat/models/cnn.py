"""Small convolutional networks: convolutions with pooling, then fully connected layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fedflat.errors import InputError
from fedflat.models.checks import image_shape, whole
from fedflat.models.layers import Staged, init_he, named


@dataclass(frozen=True)
class Plan:
    """The sizes of a `ConvNet`; each convolution halves the image by pooling.

    groups: number of groups of the GroupNorm after each convolution; 0 for none.
    """

    channels: tuple[int, ...]
    kernel: int
    hidden: tuple[int, ...]
    padding: int = 0
    groups: int = 0
    bias: bool = True

    def shrunk(self, size: int) -> int:
        """Height (or width) after all convolutions of an image so high (or wide)."""
        for _ in self.channels:
            size = (size + 2 * self.padding - self.kernel + 1) // 2
        return size

    def minimum(self) -> int:
        """The smallest image that leaves one pixel."""
        size = 1
        for _ in self.channels:
            size = 2 * size - 2 * self.padding + self.kernel - 1
        return size


class ConvNet(Staged):
    """Convolutions with ReLU and pooling (one stage each), flattened, then fully connected layers with ReLU.

    model: its name, for errors.  shape: channels, height and width of an image; any that leave one pixel.
    """

    def __init__(self, model: str, shape: tuple[int, ...], classes: int, plan: Plan) -> None:
        super().__init__()
        channels, height, width = image_shape(model, shape, plan.minimum())
        self.stem = nn.Identity()
        self.add_stages([_stage(a, b, plan) for a, b in pairwise((channels, *plan.channels))])
        pixels = plan.shrunk(height) * plan.shrunk(width)
        self.head = fully_connected((plan.channels[-1] * pixels, *plan.hidden, classes), plan.bias)


def fully_connected(sizes: tuple[int, ...], bias: bool = True) -> nn.Sequential:
    """Flatten, then linear layers from each size to the next, with a ReLU between two."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for number, (inputs, outputs) in enumerate(pairwise(sizes[:-1]), start=1):
        layers[f"linear{number}"] = nn.Linear(inputs, outputs, bias)
        layers[f"relu{number}"] = nn.ReLU()
    return named(**layers, classifier=nn.Linear(sizes[-2], sizes[-1], bias))


def _stage(inputs: int, outputs: int, plan: Plan) -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(inputs, outputs, plan.kernel, padding=plan.padding, bias=plan.bias)
    }
    if plan.groups:
        layers["norm"] = nn.GroupNorm(plan.groups, outputs)
    return named(**layers, relu=nn.ReLU(), pool=nn.MaxPool2d(2))


def cnn64(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """The CIFAR network of FedDyn, also of the papers on MAN and on FedSAM with SWA (797 962 parameters).

    Two 5×5 convolutions of 64 channels with pooling, then 384 and 192 units; images of 16×16 and more.
    width: number of channels; the fully connected layers have 6 and 3 times as many units.
    """
    width = whole("cnn64", "width", width)
    plan = Plan(channels=(width, width), kernel=5, hidden=(6 * width, 3 * width))
    return ConvNet("cnn64", shape, classes, plan)


def cnn_tiny(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """The Tiny-ImageNet network of the paper on MAN (2 447 688 parameters for 3×64×64 and 200 classes).

    Three 3×3 convolutions of 64 channels with GroupNorm (4 groups) and pooling, then 512 and 384 units;
    images of 8×8 and more.
    width: number of channels, a multiple of 4; the fully connected layers have 8 and 6 times as many units.
    """
    width = whole("cnn_tiny", "width", width)
    if width % 4:
        raise InputError(f"model 'cnn_tiny': width={width} must be a multiple of 4, the number of groups")
    plan = Plan(channels=(width,) * 3, kernel=3, hidden=(8 * width, 6 * width), padding=1, groups=4)
    return ConvNet("cnn_tiny", shape, classes, plan)


def cnn_femnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LEAF's network for FEMNIST (6 603 710 parameters for 1×28×28 and 62 classes).

    Two 5×5 convolutions of 32 and 64 channels with pooling, then 2048 units; images of 4×4 and more.
    """
    plan = Plan(channels=(32, 64), kernel=5, hidden=(2048,), padding=2)
    return ConvNet("cnn_femnist", shape, classes, plan)


def lenet5(shape: tuple[int, ...], classes: int, bias: bool = False) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling of the paper on CONST (61 770 parameters); images of 16×16 and more.

    bias: give the layers biases, which that paper leaves out everywhere.
    """
    plan = Plan(channels=(6, 16), kernel=5, hidden=(120, 84), bias=bias)
    return init_he(ConvNet("lenet5", shape, classes, plan))
