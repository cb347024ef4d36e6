"""BatchNorm's running statistics: estimated anew over a client's data, or left aside for those of the batch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.method import Update

if TYPE_CHECKING:
    from fedflat.task import Job, Task

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batchnorms(module: nn.Module) -> list[tuple[str, BatchNorm]]:
    """The layers that normalise over batches and keep statistics, by name."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BatchNorm)]
    return [(name, layer) for name, layer in layers if layer.running_mean is not None]


class ByBatch(nn.Module):
    """Normalise by the batch in every mode, and track nothing; the layer's tensors stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        layer: Any = self
        alone = x.numel() == x.shape[1]  # PyTorch refuses one value a channel; two of the same have its mean
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
    """Have the layers whose statistics are among `tensors` normalise by the batch from now on."""
    for name, layer in batchnorms(module):
        if f"{name}.running_mean".removeprefix(".") in tensors and type(layer) in BY_BATCH:
            layer.__class__ = BY_BATCH[type(layer)]  # type: ignore[assignment]


@contextmanager
def using_batch(module: nn.Module, tensors: Collection[str]) -> Iterator[None]:
    """`use_batch` for the length of a block."""
    before = [(layer, type(layer)) for _, layer in batchnorms(module)]
    use_batch(module, tensors)
    try:
        yield
    finally:
        for layer, kind in before:
            layer.__class__ = kind


@contextmanager
def _averaging(module: nn.Module) -> Iterator[None]:
    """Everything in evaluation mode but the normalisations, which start anew and take plain means over batches."""
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


@torch.no_grad()
def estimate(task: Task, job: Job) -> Update:
    """Statistics of the given weights over a client's training data, in order and without augmentation.

    Every minibatch counts the same. A last one of a single sample is left out, having no variance.
    """
    start, model, federation = time.perf_counter(), task.model, task.federation
    task.receive(job)
    samples = federation.samples(job.client)
    batches = list(torch.split(torch.arange(len(samples)), task.experiment.batch_size or len(samples)))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches.pop()
    with _averaging(model.module):
        for positions in batches:
            x, _ = samples.batch(positions)
            model(federation.preprocess(x, None, model.theta.dtype))
    model.take_features()
    seconds = time.perf_counter() - start
    buffers, counters = model.buffers.clone(), model.counters.clone()
    return Update(job.client, len(samples), seconds, buffers=buffers, counters=counters)
