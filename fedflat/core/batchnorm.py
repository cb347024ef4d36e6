"""BatchNorm: its layers, and alternatives to running statistics. `parts.batchnorm` keeps layers with the clients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batchnorms(module: nn.Module) -> list[tuple[str, BatchNorm]]:
    """The BatchNorm layers that keep running statistics, with their names."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BatchNorm)]
    return [(name, layer) for name, layer in layers if layer.running_mean is not None]


class ByBatch(nn.Module):
    """Normalise with the batch's statistics in every mode; the layer's tensors stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        layer: Any = self
        alone = x.numel() == x.shape[1]  # PyTorch refuses one value per channel; twice the same value has the same mean
        batch = torch.cat([x, x]) if alone else x
        return F.batch_norm(batch, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)[: len(x)]


class BatchNorm1dByBatch(ByBatch, nn.BatchNorm1d):
    """See `ByBatch`."""


class BatchNorm2dByBatch(ByBatch, nn.BatchNorm2d):
    """See `ByBatch`."""


class BatchNorm3dByBatch(ByBatch, nn.BatchNorm3d):
    """See `ByBatch`."""


BY_BATCH: dict[type[nn.Module], type[ByBatch]] = {
    nn.BatchNorm1d: BatchNorm1dByBatch,
    nn.BatchNorm2d: BatchNorm2dByBatch,
    nn.BatchNorm3d: BatchNorm3dByBatch,
}


def use_batch(module: nn.Module, tensors: Collection[str]) -> None:
    """Make the layers whose statistics are among `tensors` normalise with the batch's statistics from now on."""
    for name, layer in batchnorms(module):
        if f"{name}.running_mean".removeprefix(".") in tensors and type(layer) in BY_BATCH:
            layer.__class__ = BY_BATCH[type(layer)]  # type: ignore[assignment]


@contextmanager
def using_batch(module: nn.Module, tensors: Collection[str]) -> Iterator[None]:
    """`use_batch` inside a `with` block."""
    before = [(layer, type(layer)) for _, layer in batchnorms(module)]
    use_batch(module, tensors)
    try:
        yield
    finally:
        for layer, kind in before:
            layer.__class__ = kind


@contextmanager
def averaging_statistics(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, except that BatchNorm layers start new statistics: plain means over the batches."""
    module.eval()
    layers = [layer for _, layer in batchnorms(module)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.training, layer.momentum = True, None
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.training, layer.momentum = False, momentum


def forget_statistics(module: nn.Module) -> None:
    """Make every BatchNorm layer use the batch's statistics for good, in evaluation mode as well."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean = layer.running_var = None
