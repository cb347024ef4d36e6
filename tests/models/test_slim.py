"""Any network at a fraction of its width, compared with thin networks that are built from nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import draws, same
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.streams import isolated
from fedflat.models import Staged, build_model
from fedflat.models.slim import slimmed

# ---- the reference: a thin network with the leading slices of a wide one's weights ----


def rounded(value: float, divisor: int = 8) -> int:
    """R: the nearest multiple of the divisor, never less than nine tenths."""
    near = max(1, divisor * math.floor((value + divisor / 2) / divisor))
    return near + divisor if near < 0.9 * value else near


def kept(width: float, count: int, divisor: int = 8) -> int:
    """How many of so many channels there are at a width."""
    return min(count, rounded(width * count, divisor))


def thin(
    model: nn.Module,
    width: float,
    divisor: int = 8,
    *,
    first: str = "stem.conv",
    whole: tuple[str, ...] = ("head.classifier",),
    pixels: Mapping[str, int] | None = None,
) -> nn.Module:
    """A network of thin layers. first: the layer that reads images. whole: layers that keep all their outputs.

    pixels: of the maps that are flattened before a linear layer, so that a channel is so many of its inputs.
    """
    net = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.BatchNorm1d | nn.GroupNorm):
            small = _thin_layer(layer, width, divisor, name == first, name in whole, (pixels or {}).get(name, 1))
            for (_, ours), (_, full) in zip(small.named_parameters(), layer.named_parameters(), strict=True):
                ours.data = leading(full.detach(), ours.shape).clone()
            owner, _, own = name.rpartition(".")
            setattr(net.get_submodule(owner), own, small)
    return net


def leading(full: Tensor, shape: torch.Size) -> Tensor:
    return full[tuple(slice(0, size) for size in shape)]


def _thin_layer(layer: nn.Module, width: float, divisor: int, first: bool, whole: bool, pixels: int) -> nn.Module:
    if isinstance(layer, nn.Conv2d):
        outputs = layer.out_channels if whole else kept(width, layer.out_channels, divisor)
        inputs = layer.in_channels if first else kept(width, layer.in_channels, divisor)
        groups = 1 if layer.groups == 1 else outputs  # depthwise
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return nn.Conv2d(inputs, outputs, *shape, groups=groups, bias=layer.bias is not None)
    if isinstance(layer, nn.Linear):
        outputs = layer.out_features if whole else kept(width, layer.out_features, divisor)
        inputs = layer.in_features if first else kept(width, layer.in_features // pixels, divisor) * pixels
        return nn.Linear(inputs, outputs, bias=layer.bias is not None)
    if isinstance(layer, nn.GroupNorm):
        channels = kept(width, layer.num_channels, divisor)
        return nn.GroupNorm(channels // (layer.num_channels // layer.num_groups), channels, eps=layer.eps)
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    return type(layer)(kept(width, layer.num_features, divisor), eps=layer.eps, track_running_stats=False)


# ---- networks ----


def small(text: str, shape: tuple[int, ...] = (3, 16, 16), classes: int = 10) -> nn.Module:
    """A network of the package in double precision whose every tensor matters, statistics included."""
    with isolated(0, "tests"):
        return unsettle(build_model(text, shape, classes).double())


def unsettle(net: nn.Module) -> nn.Module:
    """Affine parameters and statistics that are not 0 and 1."""
    source = draws(5)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point() and tensor.dim() <= 1:
                tensor.add_(0.3 * torch.rand(tensor.shape, generator=source, dtype=tensor.dtype))
    return net


class Own(nn.Module):
    """A user's network: a forward of its own, functions instead of modules, a depthwise convolution, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.batch = nn.BatchNorm2d(16)
        self.mix = nn.Conv2d(16, 24, 1)
        self.hidden = nn.Linear(24 * 4, 40)
        self.plain = nn.BatchNorm1d(40)
        self.out = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.batch(self.depthwise(x)))
        x = F.adaptive_avg_pool2d(torch.sigmoid(self.mix(x)), 2)
        x = self.plain(self.hidden(x.flatten(1)))
        out: Tensor = self.out(torch.tanh(x))
        return out


def own() -> nn.Module:
    with isolated(1, "tests"):
        return unsettle(Own().double())


def images(count: int = 6, size: int = 16, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=draws(seed), dtype=torch.float64)


OWN = {"first": "first", "whole": ("out",), "pixels": {"hidden": 4}}
LENET = {"first": "layer1.conv", "pixels": {"head.linear1": 1}}
NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "resnet56(blocks=2, width=8)": (lambda: small("resnet56(blocks=2, width=8)"), {}),
    "resnet56(blocks=1, width=4)": (lambda: small("resnet56(blocks=1, width=4)"), {}),
    "lenet5(bias=True)": (lambda: small("lenet5(bias=True)"), LENET),
    "own": (own, OWN),
}
each_net = pytest.mark.parametrize("net", NETS)


def made(net: str) -> tuple[nn.Module, dict[str, Any]]:
    maker, options = NETS[net]
    return maker(), options


def classifier(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the layers that are never slimmed."""
    names: tuple[str, ...] = options.get("whole", ("head.classifier",))
    return names


# ---- rounding ----


@pytest.mark.parametrize(
    ("channels", "width", "divisor", "expected"),
    [
        (16, 0.8, 8, 16),
        (64, 0.8, 8, 48),
        (64, 0.25, 8, 16),
        (128, 0.25, 8, 32),
        (256, 0.25, 8, 64),
        (32, 0.8, 8, 24),
        (100, 0.8, 8, 80),
        (24, 0.5, 8, 16),  # 12 lies half-way between 8 and 16
        (40, 0.3, 8, 16),
        (22, 0.5, 8, 16),  # 8 is less than nine tenths of 11
        (8, 0.25, 8, 8),  # 1 is too little, 1 + 8 more than there are
        (12, 0.25, 8, 9),
        (4, 0.25, 8, 1),
        (100, 0.8, 1, 80),
        (10, 0.25, 1, 3),
        (10, 0.24, 1, 3),  # 2 is less than nine tenths of 2.4
        (10, 0.21, 1, 2),
        (30, 0.5, 4, 16),
        (3, 0.01, 1, 1),
    ],
)
def test_a_layer_keeps_the_rounded_share_of_its_channels(
    channels: int, width: float, divisor: int, expected: int
) -> None:
    layer, x = nn.Conv2d(3, channels, 1), torch.randn(2, 3, 4, 4, generator=draws())
    with slimmed(layer, width, divisor):
        assert layer(x).shape == (2, expected, 4, 4)
    linear = nn.Linear(3, channels)
    with slimmed(linear, width, divisor):
        assert linear(x[:, :, 0, 0]).shape == (2, expected)


def test_the_divisor_is_eight_where_none_is_given() -> None:
    layer = nn.Linear(3, 64)
    with slimmed(layer, 0.8):
        assert layer(torch.zeros(1, 3)).shape == (1, 48)


def test_fedaligns_slices_have_the_published_shapes() -> None:
    """ResNet-56 at a quarter: 128 channels enter the last stage as 32, 256 leave it as 64; ResNet-18: 64 and 128."""
    for text, wide, narrow in (("resnet56", (128, 256), (32, 64)), ("resnet18", (256, 512), (64, 128))):
        with torch.device("meta"):
            net = build_model(text, (3, 32, 32), 100)
            assert isinstance(net, Staged)
            stage, maps = net.get_submodule(net.stages[-1]), torch.empty(2, wide[0], 16, 16)
            assert stage(maps).shape == (2, wide[1], 8, 8)
            with slimmed(stage, 0.25):
                assert stage(maps[:, : narrow[0]]).shape == (2, narrow[1], 8, 8)


# ---- width 1 ----


@each_net
@pytest.mark.parametrize("training", [True, False])
def test_at_width_one_it_is_the_plain_network_bit_for_bit(net: str, training: bool) -> None:
    plain, options = made(net)
    plain.train(training)
    other, x = copy.deepcopy(plain), images()
    expected = plain(x)
    expected.square().sum().backward()
    with slimmed(other, 1.0, whole=classifier(options)):
        output = other(x)
        output.square().sum().backward()
        assert same(dict(other.state_dict()), dict(plain.state_dict()))
    assert torch.equal(output, expected)
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    assert same(dict(other.state_dict()), dict(plain.state_dict()))


# ---- width below 1 ----


@each_net
@pytest.mark.parametrize(("width", "divisor"), [(0.25, 8), (0.5, 8), (0.8, 8), (0.7, 4), (0.9, 8)])
def test_below_one_it_is_the_thin_network_of_the_leading_slices(net: str, width: float, divisor: int) -> None:
    wide, options = made(net)
    reference, x = thin(wide, width, divisor, **options), images()
    expected = reference(x)
    expected.square().sum().backward()
    with slimmed(wide, width, divisor, whole=classifier(options)):
        output = wide(x)
        output.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    for (name, full), ours in zip(wide.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        grad, outside = torch.zeros_like(full), torch.ones_like(full)
        leading(grad, ours.shape).copy_(ours.grad)
        leading(outside, ours.shape).zero_()
        assert torch.allclose(full.grad, grad, rtol=1e-8, atol=1e-9), name
        assert not (full.grad * outside).any(), f"{name}: gradient outside the leading slices"


@pytest.mark.parametrize("width", [0.3, 0.62])
def test_with_divisor_one_any_number_of_channels_can_remain(width: float) -> None:
    wide = small("resnet56(blocks=1, width=8)")
    reference, x = thin(wide, width, 1), images()
    with slimmed(wide, width, 1, whole=("head.classifier",)):
        torch.testing.assert_close(wide(x), reference(x), rtol=1e-10, atol=1e-12)


def test_flattened_maps_keep_whole_channels() -> None:
    """4×4 maps are 16 inputs a channel: those of the leading channels are the leading ones."""
    with isolated(2, "tests"):
        wide = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * 16, 5)).double()
    reference = thin(wide, 0.5, first="0", whole=("2",), pixels={"2": 16})
    x = images(size=4)
    with slimmed(wide, 0.5, whole=("2",)):
        torch.testing.assert_close(wide(x), reference(x), rtol=1e-10, atol=1e-12)


def test_signals_are_slimmed_as_images_are() -> None:
    with isolated(3, "tests"):
        wide = nn.Sequential(nn.Conv1d(2, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 16, 1)).double()
    x = torch.randn(5, 2, 9, generator=draws(), dtype=torch.float64)
    with slimmed(wide, 0.5):
        output = wide(x)
    hidden = F.conv1d(x, wide[0].weight[:16], wide[0].bias[:16])
    hidden = F.batch_norm(hidden, None, None, wide[1].weight[:16], wide[1].bias[:16], training=True)
    expected = F.conv1d(hidden.relu(), wide[3].weight[:8, :16], wide[3].bias[:8])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


def test_the_last_stage_runs_alone_on_the_leading_channels_of_what_enters_it() -> None:
    net = small("resnet56(blocks=2, width=8)")
    stage, maps = net.get_submodule("layer3"), torch.rand(4, 64, 8, 8, generator=draws(), dtype=torch.float64)
    expected = thin(net, 0.25).get_submodule("layer3")(maps[:, :16])
    assert expected.shape == (4, 32, 4, 4)
    with slimmed(stage, 0.25):
        torch.testing.assert_close(stage(maps[:, :16]), expected, rtol=1e-10, atol=1e-12)


# ---- normalisation ----


@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_below_one_uses_the_batch_and_tracks_nothing(training: bool) -> None:
    """In evaluation too: there are no statistics for that width."""
    net, x = small("resnet56(blocks=1, width=8)").train(training), images()
    before = copy.deepcopy(net.state_dict())
    with slimmed(net, 0.5, whole=("head.classifier",)):
        output = net(x)
    assert same(dict(net.state_dict()), dict(before))
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if "running" in name:
                buffer.add_(1.0)
    with slimmed(net, 0.5, whole=("head.classifier",)):
        assert torch.equal(net(x), output)


def test_batchnorm_without_statistics_or_affine_parameters_is_taken_too() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32, affine=False, track_running_stats=False)).double()
    x = images()
    with slimmed(bare, 0.5):
        output = bare(x)
    assert output.shape[1] == 16
    torch.testing.assert_close(output.mean((0, 2, 3)), torch.zeros(16).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(output, bare(x)[:, :16], rtol=1e-10, atol=1e-10)  # channels do not see each other


def test_groupnorm_keeps_its_channels_per_group() -> None:
    """8 groups of 8: at one half 4 groups of 8, so what remains is what it was at full width."""
    norm, x = nn.GroupNorm(8, 64).double(), torch.randn(3, 64, 5, 5, generator=draws(), dtype=torch.float64)
    unsettle(norm)
    expected = norm(x)[:, :32]
    with slimmed(norm, 0.5):
        torch.testing.assert_close(norm(x[:, :32]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("text", ["resnet18_gn(stem='cifar')", "mobilenetv2", "cnn_tiny"])
@pytest.mark.parametrize("width", [0.25, 0.5, 0.8])
def test_networks_with_groupnorm_run_at_every_width(text: str, width: float) -> None:
    net = build_model(text, (3, 8, 8), 10)
    with slimmed(net, width, whole=("head.classifier",)), torch.no_grad():
        output = net(torch.randn(2, 3, 8, 8, generator=draws()))
    assert output.shape == (2, 10)
    assert output.isfinite().all()


# ---- what is left behind ----


def anatomy(net: nn.Module) -> list[dict[str, Any]]:
    """Everything that modules hold, by identity where it is no plain value."""
    plain = (int, float, bool, str, tuple, type(None))
    found = []
    for module in net.modules():
        own: dict[str, Any] = {}
        for key, value in vars(module).items():
            own[key] = value if isinstance(value, plain) else id(value)
            if isinstance(value, dict):
                own[key] = {inner: id(thing) for inner, thing in value.items()}
        found.append({"class": type(module)} | own)
    return found


@each_net
def test_the_module_is_as_it_was_afterwards(net: str) -> None:
    wide, options = made(net)
    wide.eval()
    x, before, state = images(), anatomy(wide), copy.deepcopy(wide.state_dict())
    expected = wide(x)
    with slimmed(wide, 0.5, whole=classifier(options)):
        assert not torch.equal(wide(x), expected)
    assert anatomy(wide) == before
    assert same(dict(wide.state_dict()), dict(state))
    assert torch.equal(wide(x), expected)


def test_the_module_is_as_it_was_after_an_error_inside() -> None:
    net = small("resnet56(blocks=1, width=8)").eval()
    x, before = images(), anatomy(net)
    expected = net(x)
    with pytest.raises(KeyError, match="inside"), slimmed(net, 0.5, whole=("head.classifier",)):
        net(x)
        raise KeyError("inside")
    with pytest.raises(RuntimeError), slimmed(net, 0.5, whole=("head.classifier",)):
        net(torch.zeros(1, 7))
    assert anatomy(net) == before
    assert torch.equal(net(x), expected)


def test_one_width_after_another() -> None:
    """As GradAug trains: several widths in turn, gradients adding up in the one set of weights."""
    net, x = small("resnet56(blocks=1, width=8)"), images()
    for width in (0.8, 0.5):
        with slimmed(net, width, whole=("head.classifier",)):
            net(x).square().sum().backward()
    together = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    apart = [torch.zeros_like(p) for p in net.parameters()]
    for width in (0.8, 0.5):
        reference = thin(net, width)
        reference(x).square().sum().backward()
        for total, ours in zip(apart, reference.parameters(), strict=True):
            assert ours.grad is not None
            leading(total, ours.shape).add_(ours.grad)
    for ours, total in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, total, rtol=1e-8, atol=1e-9)
