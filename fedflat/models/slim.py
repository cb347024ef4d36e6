"""Run a network at a fraction of its width: sub-networks that share the weights of the whole.

At width ω a layer uses the leading R(ω·C) of its C outputs and as many inputs as it is handed, so a slimmed network is
made of leading slices of the weights; nothing is copied or stored for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import InputError


def leading(channels: int, width: float, divisor: int = 8) -> int:
    """How many of `channels` are left at `width`: R(width·channels), and all of them at width 1.

    R(v) = max(1, d·⌊(v + d/2)/d⌋), plus d where that is below 0.9·v; d is the divisor.

    >>> leading(256, 0.25), leading(16, 0.8), leading(100, 0.8, divisor=1)
    (64, 16, 80)
    """
    if width == 1:
        return channels
    wanted = width * channels
    rounded = max(1, divisor * math.floor((wanted + divisor / 2) / divisor))
    return min(channels, rounded if rounded >= 0.9 * wanted else rounded + divisor)


@contextmanager
def slimmed(module: nn.Module, width: float, divisor: int = 8, whole: Collection[str] = ()) -> Iterator[None]:
    """Inside the block `module` runs at `width`, a fraction; afterwards it is as it was. Width 1 changes nothing.

    divisor: of the numbers of channels that are left, see `leading`.
    whole: names of layers that keep all their outputs, such as the classifier. Inputs need no such care: a layer
        takes what it is handed, so images, and what a whole layer puts out, are used in full.

    BatchNorm normalises with the batch and tracks nothing, in evaluation as well. GroupNorm keeps the channels a group
    and has fewer groups. A grouped convolution keeps its leading groups as they are. A block within a block is refused.
    """
    if not 0 < width <= 1:
        raise InputError(f"a width lies above 0 and is at most 1, got {width}")
    layers = [] if width == 1 else _layers(module)
    try:
        for name, layer, run in layers:
            keep = partial(leading, width=1.0 if name in whole else width, divisor=divisor)
            # A `forward` of the instance shadows that of its class; hooks and all else go on as usual.
            vars(layer)["forward"] = partial(run, layer, keep)
        yield
    finally:
        for _, layer, _ in layers:
            vars(layer).pop("forward", None)


Run = Callable[[Any, Callable[[int], int], Tensor], Tensor]
"""How a layer runs slimmed: the layer, how many of so many outputs to keep, its input."""


def _convolve(function: Callable[..., Tensor]) -> Run:
    def run(layer: Any, keep: Callable[[int], int], x: Tensor) -> Tensor:
        inputs, outputs, groups = x.shape[1], keep(layer.out_channels), layer.groups
        if groups > 1:
            groups, rest = divmod(inputs, layer.in_channels // groups)
            outputs = groups * (layer.out_channels // layer.groups)
            if rest:
                raise InputError(f"{inputs} channels are no whole number of groups of {layer}; choose another divisor")
        weight = layer.weight[:outputs, : inputs // groups]
        bias = None if layer.bias is None else layer.bias[:outputs]
        padding = layer.padding
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
        return function(x, weight, bias, layer.stride, padding, layer.dilation, groups)

    return run


def _linear(layer: nn.Linear, keep: Callable[[int], int], x: Tensor) -> Tensor:
    outputs = keep(layer.out_features)
    return F.linear(x, layer.weight[:outputs, : x.shape[-1]], None if layer.bias is None else layer.bias[:outputs])


def _batch_norm(layer: nn.BatchNorm2d, keep: Callable[[int], int], x: Tensor) -> Tensor:
    weight, bias = _affine(layer, x.shape[1])
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)


def _group_norm(layer: nn.GroupNorm, keep: Callable[[int], int], x: Tensor) -> Tensor:
    channels = x.shape[1]
    groups = max(1, channels * layer.num_groups // layer.num_channels)
    groups = next(number for number in range(groups, 0, -1) if channels % number == 0)
    return F.group_norm(x, groups, *_affine(layer, channels), eps=layer.eps)


def _affine(layer: Any, channels: int) -> tuple[Tensor | None, Tensor | None]:
    return (layer.weight[:channels], layer.bias[:channels]) if layer.affine else (None, None)


LAYERS: dict[type[nn.Module], Run] = {
    nn.Conv1d: _convolve(F.conv1d),
    nn.Conv2d: _convolve(F.conv2d),
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
}
"""The layers that can be slimmed. Layers without weights run as they are."""


def _layers(module: nn.Module) -> list[tuple[str, nn.Module, Run]]:
    """Every layer with weights: its name, itself, how it runs slimmed. Refuse one of which that is not known."""
    found = []
    for name, layer in module.named_modules():
        kind = next((k for k in LAYERS if isinstance(layer, k) and type(layer).forward is k.forward), None)
        if kind is not None:
            found.append((name, layer, LAYERS[kind]))
        elif next(layer.parameters(recurse=False), None) is not None:
            known = ", ".join(kind.__name__ for kind in LAYERS)
            raise InputError(
                f"{name or 'the network'} is a {type(layer).__name__}, which cannot be slimmed; {known} can"
            )
    for name, layer, _ in found:
        if "forward" in vars(layer):
            raise InputError(f"{name or 'the network'} is slimmed already, or its forward() was replaced")
    return found
