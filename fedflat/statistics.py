"""BatchNorm's running statistics: estimated anew over a client's data, or left aside for those of the batch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedflat.method import Update

if TYPE_CHECKING:
    from fedflat.client import Job, Task

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def batchnorms(module: nn.Module) -> list[tuple[str, BatchNorm]]:
    """The layers that normalise over batches and keep statistics, by name."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BatchNorm)]
    return [(name, layer) for name, layer in layers if layer.running_mean is not None]


def use_batch(module: nn.Module, tensors: Collection[str]) -> None:
    """Have the layers whose statistics are among `tensors` normalise by the batch, and track nothing."""
    for name, layer in batchnorms(module):
        if f"{name}.running_mean".removeprefix(".") in tensors:
            layer.training, layer.track_running_stats = True, False


@contextmanager
def using_batch(module: nn.Module, tensors: Collection[str]) -> Iterator[None]:
    """`use_batch` for the length of a block."""
    layers = [layer for _, layer in batchnorms(module)]
    before = [(layer.training, layer.track_running_stats) for layer in layers]
    use_batch(module, tensors)
    try:
        yield
    finally:
        for layer, (training, tracking) in zip(layers, before, strict=True):
            layer.training, layer.track_running_stats = training, tracking


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
    return Update(
        client=job.client,
        samples=len(samples),
        weight=job.weight,
        steps=0,
        loss=float("nan"),
        seconds=time.perf_counter() - start,
        delta=torch.empty(0),
        buffers=model.buffers.clone(),
        counters=model.counters.clone(),
        sent={},
        states={},
    )
