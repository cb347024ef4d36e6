"""What other packages call the layers of networks that this package has, too."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from fedflat.models.mobilenet import STAGES


def translated(names: Collection[str]) -> tuple[str, dict[str, str]] | None:
    """Whose names of tensors these are, and what each is called here; None if no package is known to call them so."""
    for family, layers in _families().items():
        parts = {name: name.rpartition(".") for name in names}
        if parts and all(layer in layers for layer, _, _ in parts.values()):
            return family, {name: f"{layers[layer]}.{tensor}" for name, (layer, _, tensor) in parts.items()}
    return None


@cache
def _families() -> dict[str, dict[str, str]]:
    """Layers' names there and here, by package and network."""
    return {
        "torchvision's and timm's ResNet": _resnet(),
        "torchvision's MobileNetV2": _torchvision_mobilenet(),
        "timm's MobileNetV2": _timm_mobilenet(),
    }


def _resnet(deepest: int = 40) -> dict[str, str]:
    """Names of ResNets of any depth, whose stages have fewer than `deepest` blocks."""
    layers = {"conv1": "stem.conv", "bn1": "stem.norm", "fc": "head.classifier"}
    for block in (f"layer{stage}.{place}" for stage in range(1, 5) for place in range(deepest)):
        for number in (1, 2, 3):
            layers[f"{block}.conv{number}"] = f"{block}.branch.conv{number}"
            layers[f"{block}.bn{number}"] = f"{block}.branch.norm{number}"
        layers |= {f"{block}.downsample.0": f"{block}.shortcut.conv", f"{block}.downsample.1": f"{block}.shortcut.norm"}
    return layers


def _blocks() -> list[tuple[int, int, str]]:
    """Stage, place in it, and our name of every block of MobileNetV2; blocks after a stage's first have a shortcut."""
    return [
        (stage, place, f"layer{stage + 1}.{place}{'.branch' if place else ''}")
        for stage, (_, _, count, _) in enumerate(STAGES)
        for place in range(count)
    ]


def _torchvision_mobilenet() -> dict[str, str]:
    layers = {"features.0.0": "stem.conv", "features.0.1": "stem.norm", "classifier.1": "head.classifier"}
    layers |= {"features.18.0": "head.conv", "features.18.1": "head.norm"}
    for number, (stage, _, own) in enumerate(_blocks(), start=1):
        count = 3 if stage else 2  # the first stage does not widen its input: it has no first convolution
        theirs = [*(f"{place}.{kind}" for place in range(count - 1) for kind in (0, 1)), count - 1, count]
        ours = [f"{kind}{n}" for n in range(4 - count, 4) for kind in ("conv", "norm")]
        layers |= {f"features.{number}.conv.{t}": f"{own}.{o}" for t, o in zip(theirs, ours, strict=True)}
    return layers


def _timm_mobilenet() -> dict[str, str]:
    layers = {"conv_stem": "stem.conv", "bn1": "stem.norm", "classifier": "head.classifier"}
    layers |= {"conv_head": "head.conv", "bn2": "head.norm"}
    for stage, place, own in _blocks():
        convolutions = ("conv_pw", "conv_dw", "conv_pwl") if stage else ("conv_dw", "conv_pw")
        for number, name in enumerate(convolutions, start=1):
            ours = number + (not stage)
            layers[f"blocks.{stage}.{place}.{name}"] = f"{own}.conv{ours}"
            layers[f"blocks.{stage}.{place}.bn{number}"] = f"{own}.norm{ours}"
    return layers
