"""The papers' residual networks of 18, 50 and 56 layers."""

from __future__ import annotations

from torch import nn

from fedflat.models.checks import image_shape, one_of, whole
from fedflat.models.layers import init_fan_out, init_he, norm_layer
from fedflat.models.resnet import ResNet


def _standard(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    stem: str,
    norm: str = "bn",
    groups: int = 2,
    deep: bool = False,
    bias: bool = True,
    projection: int = 0,
    width: int = 64,
) -> ResNet:
    """ResNet-18, or -50 if `deep`, before its initialisation; `model` is named in errors."""
    return ResNet(
        image_shape(model, shape)[0],
        classes,
        (3, 4, 6, 3) if deep else (2, 2, 2, 2),
        bottleneck=deep,
        stem=one_of(model, "stem", stem, ("imagenet", "cifar")),
        norm=norm_layer(model, norm, groups),
        bias=bias,
        projection=whole(model, "projection", projection, least=0),
        width=whole(model, "width", width),
    )


def resnet18(shape: tuple[int, ...], classes: int, stem: str = "cifar", projection: int = 0) -> nn.Module:
    """ResNet-18 with BatchNorm.

    stem: "cifar" (3×3, no pooling) or "imagenet" (7×7 at stride 2, then pooling).
    projection: 256 adds MOON's projection (512, 512, 256) before the classifier.
    """
    return init_fan_out(_standard("resnet18", shape, classes, stem=stem, projection=projection))


def resnet18_imagenet(shape: tuple[int, ...], classes: int, projection: int = 0) -> nn.Module:
    """ResNet-18 with BatchNorm and the ImageNet stem (FedAlign's ImageNet-200; 1.814 G MACs at 224×224)."""
    return init_fan_out(_standard("resnet18_imagenet", shape, classes, stem="imagenet", projection=projection))


def resnet18_gn(
    shape: tuple[int, ...],
    classes: int,
    stem: str = "imagenet",
    groups: int = 2,
    init: str = "default",
    width: int = 64,
) -> nn.Module:
    """ResNet-18 with GroupNorm, of FedDyn and of the paper on FedSAM with SWA (11 181 642 parameters).

    stem: "imagenet" (7×7 at stride 2, then pooling) or "cifar" (3×3, no pooling).
    groups: number of groups in every layer.
    init: "default" (PyTorch's) or "fan_out" (Kaiming's normal law, as in FedDyn's own code).
    width: channels of the first stage; fewer give small members of the family.
    """
    net = _standard("resnet18_gn", shape, classes, stem=stem, norm="gn", groups=groups, width=width)
    fan_out = one_of("resnet18_gn", "init", init, ("default", "fan_out")) == "fan_out"
    return init_fan_out(net) if fan_out else net


def resnet18_nonorm(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """ResNet-18 of the paper on CONST: CIFAR stem, neither normalisation nor biases (11 164 352 parameters).

    Without normalisation its scores start large: train it with a small learning rate or with CONST.
    width: channels of the first stage; fewer give small members of the family.
    """
    return init_he(_standard("resnet18_nonorm", shape, classes, stem="cifar", norm="none", bias=False, width=width))


def resnet18_bn_nostats(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """ResNet-18 of the baselines of the paper on CONST: BatchNorm without statistics, CIFAR stem.

    Neither the convolutions nor the classifier have a bias. It normalises with the batch in evaluation too,
    so its scores depend on what else is in the batch.
    width: channels of the first stage; fewer give small members of the family.
    """
    net = _standard("resnet18_bn_nostats", shape, classes, stem="cifar", norm="bn_nostats", bias=False, width=width)
    return init_he(net)


def resnet50(
    shape: tuple[int, ...], classes: int, stem: str = "imagenet", norm: str = "bn", groups: int = 2
) -> nn.Module:
    """ResNet-50; the stride of a bottleneck is in its 3×3 convolution.

    stem: "imagenet" (7×7 at stride 2, then pooling) or "cifar" (3×3, no pooling).
    norm: "bn", "gn" (GroupNorm of `groups` groups in every layer), "bn_nostats" or "none".
    """
    return init_fan_out(_standard("resnet50", shape, classes, stem=stem, norm=norm, groups=groups, deep=True))


def resnet50_gn(shape: tuple[int, ...], classes: int, stem: str = "imagenet", groups: int = 2) -> nn.Module:
    """ResNet-50 with GroupNorm, of the paper on PLGU (Tiny-ImageNet); options as in `resnet50`."""
    return init_fan_out(_standard("resnet50_gn", shape, classes, stem=stem, norm="gn", groups=groups, deep=True))


def resnet56(shape: tuple[int, ...], classes: int, projection: int = 0, blocks: int = 6, width: int = 16) -> nn.Module:
    """ResNet-56 of FedML and FedAlign: three stages of bottlenecks, BatchNorm (100 classes: 614 452 weights).

    projection: 256 adds MOON's projection (256, 256, 256) before the classifier.
    blocks, width: bottlenecks in a stage and planes of the first; fewer give small members of the family.
    """
    net = ResNet(
        image_shape("resnet56", shape)[0],
        classes,
        [whole("resnet56", "blocks", blocks)] * 3,
        norm=norm_layer("resnet56", "bn"),
        width=whole("resnet56", "width", width),
        bottleneck=True,
        projection=whole("resnet56", "projection", projection, least=0),
    )
    return init_fan_out(net)
