"""Counts the multiply-accumulate operations (MACs) of the convolutions and linear layers that are executed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.models.layers import ResidualBlock

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)


@dataclass
class Count:
    """The number of MACs so far, over all samples."""

    macs: float = 0.0


@contextmanager
def counting(module: nn.Module) -> Iterator[Count]:
    """Count the MACs of all forward passes through `module` inside the block; slimmed layers count at their width.

    A branch that stochastic depth may drop is always executed here and counts with its survival probability, so that
    the count is the expected one.
    """
    count, chances = Count(), _chances(module)
    blocks = [block for block in module.modules() if isinstance(block, ResidualBlock)]
    survivals = [block.survival for block in blocks]

    def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        count.macs += chances.get(layer, 1.0) * layer_macs(layer, inputs[0], output)

    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, WEIGHTED):
                stack.enter_context(layer.register_forward_hook(add))
        try:
            for block in blocks:
                block.survival = 1.0
            yield count
        finally:
            for block, survival in zip(blocks, survivals, strict=True):
                block.survival = survival


def _chances(module: nn.Module) -> dict[nn.Module, float]:
    """The probability that a layer in the branch of a residual block is executed."""
    chances: dict[nn.Module, float] = {}
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            for layer in block.branch.modules():
                chances[layer] = chances.get(layer, 1.0) * block.survival
    return chances


def layer_macs(layer: Any, x: Tensor, output: Tensor) -> int:
    """MACs of one pass through a layer, from the numbers of channels of its input and output.

    >>> layer_macs(nn.Linear(3, 5), torch.ones(2, 3), torch.ones(2, 5))
    30
    """
    if isinstance(layer, nn.Linear):
        return output.numel() * x.shape[-1]
    fan = layer.weight.shape[1] if layer.groups > 1 or isinstance(layer, TRANSPOSED) else x.shape[1]
    return (x if isinstance(layer, TRANSPOSED) else output).numel() * int(fan * math.prod(layer.kernel_size))


@torch.no_grad()
def forward_macs(module: nn.Module, shape: tuple[int, ...]) -> float:
    """MACs of the forward pass of one sample of this shape.

    >>> forward_macs(nn.Linear(3, 5), (3,))
    15.0
    """
    parameter = next(module.parameters())
    training, x = module.training, torch.zeros((1, *shape), dtype=parameter.dtype)
    try:
        with counting(module.eval()) as count:
            module(x)
    finally:
        module.train(training)
    return count.macs


def weight_parameters(module: nn.Module) -> int:
    """The number of parameters of convolutions and linear layers, with biases, without normalisation layers."""
    layers = (layer for layer in module.modules() if isinstance(layer, WEIGHTED))
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad)
