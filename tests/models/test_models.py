"""The papers' networks: their published sizes, and the promises the methods rely on."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from fedflat.core.streams import isolated
from fedflat.errors import InputError
from fedflat.models import MODELS, ResidualBlock, Staged, build_model
from fedflat.models.layers import norm_layer
from fedflat.models.wide import WideResNet

CIFAR, TINY, IMAGENET, MNIST, DIGITS = (3, 32, 32), (3, 64, 64), (3, 224, 224), (1, 28, 28), (1, 8, 8)
CLASSIFIERS = sorted(set(MODELS) - {"bisenetv2", "char_lstm", "char_transformer"})
IMAGE_MODELS = sorted(set(CLASSIFIERS) - {"mlp", "logistic", "resnet56_fedml"})
SMALL = [
    "cnn64",
    "cnn_tiny",
    "lenet5",
    "mlp",
    "logistic",
    "resnet56(blocks=1, width=4)",
    "resnet18_gn",
    "mobilenetv2",
]


def sketch(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network without memory for its weights: shapes and counts only."""
    with torch.device("meta"):
        return build_model(text, shape, classes)


def seeded(text: str, shape: tuple[int, ...] = CIFAR, classes: int = 10) -> nn.Module:
    with isolated(0, "init"):
        return build_model(text, shape, classes)


def images(count: int, shape: tuple[int, ...] = CIFAR) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiply-accumulates of convolutions and linear layers for one input."""
    total = 0

    def add(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        assert isinstance(module, nn.Conv2d | nn.Linear)
        total += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(add)
    model.eval()(torch.empty(1, *shape, device="meta"))
    return total


# ---------------------------------------------------------------- sizes stated by the papers and their code


@pytest.mark.parametrize(
    ("text", "shape", "classes", "parameters"),
    [
        ("cnn64", CIFAR, 10, 797_962),
        ("cnn64(width=16)", CIFAR, 100, 55_684),
        ("resnet18_nonorm(width=16)", CIFAR, 10, 699_056),
        ("cnn64", CIFAR, 100, 815_332),
        ("cnn_tiny", TINY, 200, 2_447_688),
        ("lenet5", CIFAR, 10, 61_770),
        ("lenet5", CIFAR, 100, 69_330),
        (
            "lenet5(bias=True)",
            (1, 32, 32),
            10,
            61_706,
        ),  # the size usually quoted for LeNet-5 on 32×32 grey images
        ("resnet18_gn", CIFAR, 10, 11_181_642),
        ("resnet18_gn", CIFAR, 100, 11_227_812),
        ("resnet18_gn(stem='cifar')", CIFAR, 10, 11_173_962),
        ("resnet18_gn(stem='cifar')", CIFAR, 100, 11_220_132),
        ("resnet18_gn(stem='cifar')", CIFAR, 200, 11_271_432),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("resnet18(stem='imagenet')", CIFAR, 10, 11_181_642),
        ("resnet18_imagenet", IMAGENET, 200, 11_279_112),
        ("resnet18_imagenet", IMAGENET, 1000, 11_689_512),
        ("resnet18_nonorm", CIFAR, 10, 11_164_352),
        ("resnet18_nonorm", CIFAR, 100, 11_210_432),
        ("resnet56", CIFAR, 10, 591_322),
        ("resnet56_fedml", CIFAR, 100, 614_452),
        ("resnet56(projection=256)", CIFAR, 10, 722_906),
        ("resnet56(projection=256)", CIFAR, 100, 746_036),
        ("resnet50(stem='cifar')", TINY, 200, 23_910_152),
        ("resnet50", TINY, 200, 23_917_832),
        ("resnet50(norm='gn')", TINY, 200, 23_917_832),
        ("resnet50_gn", TINY, 200, 23_917_832),
        ("resnet50", IMAGENET, 1000, 25_557_032),
        ("wrn28_10", CIFAR, 10, 36_479_194),
        ("wrn28_10", CIFAR, 100, 36_536_884),
        ("wrn28_10_gn", CIFAR, 100, 36_536_884),
        ("mobilenetv2", IMAGENET, 203, 2_483_915),
        ("mobilenetv2", IMAGENET, 1000, 3_504_872),
        ("mobilenetv2(norm='bn')", IMAGENET, 1000, 3_504_872),
        ("mobilenetv2", IMAGENET, 2028, 4_821_740),
        ("logistic", MNIST, 10, 7_850),
        ("mlp(hidden=(200, 200))", MNIST, 10, 199_210),  # the "2NN" of McMahan et al., 2017
    ],
)
def test_parameter_counts(text: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert count(sketch(text, shape, classes)) == parameters


@pytest.mark.parametrize(
    ("text", "shape", "classes", "millions"),
    [
        ("resnet56", CIFAR, 10, 87.215),
        ("resnet56", CIFAR, 100, 87.238),
        ("resnet18_imagenet", IMAGENET, 200, 1813.664),
    ],
)
def test_multiply_accumulates(text: str, shape: tuple[int, ...], classes: int, millions: float) -> None:
    assert round(macs(sketch(text, shape, classes), shape) / 1e6, 3) == millions


def test_fedaligns_cost_table_counts_convolutions_and_linear_layers_only() -> None:
    for text, expected in (("resnet56", 605_460), ("resnet56(projection=256)", 737_044)):
        layers = [m for m in sketch(text, CIFAR, 100).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert sum(count(layer) for layer in layers) == expected


def test_resnet56_carries_9050_numbers_of_statistics() -> None:
    assert sum(b.numel() for b in sketch("resnet56", CIFAR, 100).buffers()) == 9_050


@pytest.mark.parametrize(
    ("text", "layers"), [("resnet18", 21), ("resnet50", 54), ("wrn28_10", 29), ("mobilenetv2", 53)]
)
def test_number_of_weight_layers(text: str, layers: int) -> None:
    model = sketch(text, CIFAR, 10)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == layers


def test_resnet18_has_41_modules_with_weights_and_62_tensors() -> None:
    model = sketch("resnet18", CIFAR, 10)
    assert sum(bool(list(m.parameters(recurse=False))) for m in model.modules()) == 41
    assert len(list(model.parameters())) == 62


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("resnet18", 8), ("resnet56", 18), ("resnet50", 16), ("wrn28_10", 12), ("mobilenetv2", 10)],
)
def test_number_of_residual_blocks(text: str, blocks: int) -> None:
    assert sum(isinstance(m, ResidualBlock) for m in sketch(text, CIFAR, 10).modules()) == blocks


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [MNIST, (4, 17, 40)])
def test_every_network_takes_images_of_other_sizes(name: str, shape: tuple[int, ...]) -> None:
    scores = sketch(name, shape, 7)(torch.empty(2, *shape, device="meta"))
    assert scores.shape == (2, 7)


@pytest.mark.parametrize("shape", [(5,), MNIST, (4, 6)])
@pytest.mark.parametrize("text", ["mlp", "mlp(hidden=8)", "mlp(hidden=())", "mlp((8, 4))", "logistic"])
def test_simple_networks_take_any_shape(text: str, shape: tuple[int, ...]) -> None:
    assert seeded(text, shape, 3)(images(2, shape)).shape == (2, 3)


def test_features_of_resnet56_that_fedalign_compares() -> None:
    model = sketch("resnet56", CIFAR, 100)
    assert isinstance(model, Staged)
    x, shapes = model.stem(torch.empty(2, *CIFAR, device="meta")), []
    for name in model.stages:
        x = model.get_submodule(name)(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 64, 32, 32), (2, 128, 16, 16), (2, 256, 8, 8)]


def test_features_of_resnet18_on_imagenet_that_fedalign_compares() -> None:
    model, seen = sketch("resnet18_imagenet", IMAGENET, 200), {}
    assert isinstance(model, Staged)
    for name in model.stages[-2:]:
        model.get_submodule(name).register_forward_hook(lambda m, i, out: seen.update({m: tuple(out.shape)}))
    model(torch.empty(2, *IMAGENET, device="meta"))
    assert list(seen.values()) == [(2, 256, 14, 14), (2, 512, 7, 7)]


def test_moons_projection_ends_in_256_features() -> None:
    for text, features in (("resnet56(projection=256)", 256), ("resnet18_imagenet(projection=256)", 512)):
        linear = [m for m in sketch(text, CIFAR, 10).modules() if isinstance(m, nn.Linear)]
        sizes = [(m.in_features, m.out_features) for m in linear]
        assert sizes == [(features, features), (features, 256), (256, 10)]


# ---------------------------------------------------------------- promises the methods rely on


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_each_activation_is_its_own_module_used_once(name: str) -> None:
    model, calls = sketch(name, CIFAR, 10), Counter[nn.Module]()
    activations = [m for m in model.modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
    for module in activations:
        module.register_forward_hook(lambda m, i, out: calls.update([m]))
    model(torch.empty(2, *CIFAR, device="meta"))
    assert [calls[m] for m in activations] == [1] * len(activations)
    assert not any(m.inplace for m in activations)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_classifier_is_the_last_linear_layer(name: str) -> None:
    model, seen = sketch(name, CIFAR, 10), []
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    last.register_forward_hook(lambda m, i, out: seen.append(out))
    scores = model(torch.empty(2, *CIFAR, device="meta"))
    assert len(seen) == 1
    assert seen[0] is scores


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_parameter_takes_part(name: str) -> None:
    model = sketch(name, CIFAR, 10)
    model(torch.empty(2, *CIFAR, device="meta")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_stages_are_declared_and_hold_the_network_between_stem_and_head(name: str) -> None:
    model = sketch(name, CIFAR, 10)
    assert isinstance(model, Staged)
    assert {"stem", *model.stages, "head"} == {child for child, _ in model.named_children()}
    declared = [model.get_submodule(stage) for stage in model.stages]
    assert [m for m in model.children() if m in declared] == declared


def test_a_silenced_branch_leaves_the_shortcut() -> None:
    model = seeded("resnet18_gn(stem='cifar')", DIGITS)
    for block in [m for m in model.modules() if isinstance(m, ResidualBlock)]:
        x = images(2, (next(block.branch.parameters()).shape[1], 4, 4))
        with torch.no_grad():
            for parameter in list(block.branch.parameters())[-2:]:  # the branch's last normalisation
                parameter.zero_()
            assert torch.equal(block(x), block.shortcut(x).relu())


def test_resnet_stages_end_in_a_relu_and_pre_activated_stages_do_not() -> None:
    x = images(2, (3, 8, 8))
    wide = WideResNet(3, 10, blocks=2, widen=1, norm=norm_layer("wide", "bn"))
    for model, negative in ((seeded("resnet56(blocks=1)"), False), (wide, True)):
        assert isinstance(model, Staged)
        h = model.stem(x)
        for name in model.stages:
            h = model.get_submodule(name)(h)
            assert bool((h < 0).any()) is negative


def test_a_pre_activated_block_of_equal_shape_adds_to_its_raw_input() -> None:
    wide = WideResNet(3, 10, blocks=2, widen=1, norm=norm_layer("wide", "bn"))
    block = wide.get_submodule("layer2.1")
    assert isinstance(block, ResidualBlock)
    x = images(2, (32, 4, 4))
    assert torch.equal(block(x), x + block.branch(x))


# ---------------------------------------------------------------- mathematics


@pytest.mark.parametrize("text", SMALL)
def test_double_precision_and_channels_last_compute_the_same_function(text: str) -> None:
    model, x = seeded(text).eval(), images(2)
    with torch.no_grad():
        single, double = model(x), copy.deepcopy(model).double()(x.double())
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        strided = last(x.contiguous(memory_format=torch.channels_last))
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(single, strided, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["lenet5", "resnet18_nonorm"])
def test_networks_without_biases_are_positively_homogeneous(text: str) -> None:
    model, x = seeded(text, (3, 16, 16)), images(2, (3, 16, 16))
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    with torch.no_grad():
        torch.testing.assert_close(model(4 * x), 4 * model(x))


def test_lenet5_can_have_biases() -> None:
    biases = [n for n, _ in sketch("lenet5(bias=True)", CIFAR, 10).named_parameters() if n.endswith("bias")]
    assert len(biases) == 5


def test_logistic_regression_is_affine() -> None:
    model, x = seeded("logistic").double(), images(2).double()
    a, b = x
    combined = torch.stack([0.25 * a + 0.75 * b])
    torch.testing.assert_close(model(combined), 0.25 * model(x)[:1] + 0.75 * model(x)[1:])


def test_group_norm_treats_samples_alone_and_batch_norm_without_statistics_does_not() -> None:
    x = images(3, (3, 8, 8))
    with torch.no_grad():
        group = seeded("resnet18_gn").eval()
        torch.testing.assert_close(group(x)[:2], group(x[:2]), rtol=1e-4, atol=1e-4)
        batch = seeded("resnet18_bn_nostats").eval()
        assert not torch.allclose(batch(x)[:2], batch(x[:2]), rtol=1e-2)


def test_batch_norm_without_statistics_has_no_buffers_and_no_bias_in_the_classifier() -> None:
    model = sketch("resnet18_bn_nostats", CIFAR, 10)
    assert not list(model.buffers())
    assert count(model) == count(sketch("resnet18", CIFAR, 10)) - 10


def test_every_group_norm_has_the_groups_asked_for() -> None:
    for text, groups in (
        ("resnet18_gn", 2),
        ("resnet50_gn(groups=4)", 4),
        ("wrn28_10_gn", 2),
        ("mobilenetv2", 8),
    ):
        norms = [m for m in sketch(text, CIFAR, 10).modules() if "Norm" in type(m).__name__]
        assert norms
        assert all(isinstance(m, nn.GroupNorm) and m.num_groups == groups for m in norms)


# ---------------------------------------------------------------- initialisation


@pytest.mark.parametrize("text", ["lenet5", "resnet18_nonorm"])
def test_he_initialisation_gives_channels_of_norm_root_two(text: str) -> None:
    weights = [p for p in seeded(text, CIFAR, 100).parameters() if p.shape[0] >= 64]
    for weight in weights:
        assert weight.flatten(1).norm(dim=1).mean().item() == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("text", ["resnet18", "resnet56", "resnet18_gn(init='fan_out')", "mobilenetv2"])
def test_kaiming_initialisation_by_fan_out(text: str) -> None:
    convolutions = [m for m in seeded(text).modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 2000]
    for module in convolutions:
        fan_out = module.weight.numel() / module.in_channels * module.groups
        assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)


def test_resnet18_gn_starts_from_pytorchs_defaults() -> None:
    for module in seeded("resnet18_gn").modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.abs().max().item() <= 1 / math.sqrt(module.weight[0].numel())


@pytest.mark.parametrize("text", ["resnet18", "resnet56", "mobilenetv2", "cnn_tiny"])
def test_normalisations_start_as_the_identity(text: str) -> None:
    for module in seeded(text).modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))


def test_a_seed_decides_the_weights() -> None:
    with isolated(1, "init"):
        other = build_model("lenet5", CIFAR, 10)
    first, again = seeded("lenet5"), seeded("lenet5")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_vectors_into_an_image_network_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(InputError, match=rf"'{name}' takes images .*\(64,\).*use 'mlp' or 'logistic'"):
        build_model(name, (64,), 10)


@pytest.mark.parametrize(("name", "least"), [("cnn64", 16), ("lenet5", 16), ("cnn_tiny", 8)])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(name: str, least: int) -> None:
    assert seeded(name, (1, least, least))(images(1, (1, least, least))).shape == (1, 10)
    with pytest.raises(
        InputError, match=rf"'{name}' needs images of at least {least}×{least}, got {least}×{least - 1}"
    ):
        build_model(name, (1, least, least - 1), 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet56_fedm", "did you mean 'resnet56_fedml'"),
        ("lenet", "unknown model 'lenet': did you mean 'lenet5'"),
        ("lenet5(bais=True)", "did you mean 'bias'"),
        ("resnet18_gn(stem='cifer')", "unknown stem of model 'resnet18_gn': 'cifer': did you mean 'cifar'"),
        ("resnet18_gn(init='he')", "unknown init of model 'resnet18_gn'"),
        ("resnet50(norm='ln')", "unknown norm of model 'resnet50'"),
        ("resnet18_gn(groups=3)", "64 channels cannot be divided into groups=3"),
        ("resnet18_gn(groups=0)", "groups must be a whole number of at least 1, got 0"),
        ("resnet56(blocks=0)", "blocks must be a whole number of at least 1, got 0"),
        ("resnet56(projection=-1)", "projection must be a whole number of at least 0, got -1"),
        ("resnet56(width=1.5)", "width takes a whole number, not 1.5"),
        ("mlp(hidden=(8, 0))", "hidden must be a whole number of at least 1, got 0"),
        ("cnn64(64, 8)", "takes at most 1 value"),
        ("cnn64+man", "names 2 things"),
    ],
)
def test_a_wrong_declaration_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sketch(text, CIFAR, 10)


@pytest.mark.parametrize(("shape", "classes"), [((3, 0, 32), 10), ((), 10), (CIFAR, 0), (CIFAR, True)])
def test_impossible_sizes_are_refused(shape: tuple[int, ...], classes: int) -> None:
    for name in ("lenet5", "logistic"):
        with pytest.raises(InputError, match=name):
            build_model(name, shape, classes)
