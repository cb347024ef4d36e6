"""The minibatches of a client: the order of its samples, and inputs prepared for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.inputs import map_inputs
from fedflat.core.samples import IGNORED, Samples
from fedflat.core.views import Batch, Local
from fedflat.data.samples import Ahead
from fedflat.errors import InputError
from fedflat.experiment import Experiment

BLOCK = 3 << 18  # numbers preprocessed at once: large enough to spread fixed costs, small enough for the cache
Pair = tuple[Any, Tensor]
"""Inputs and labels of one minibatch."""
Preprocess = Callable[[Any, streams.Stream | None, torch.dtype], Any]
"""Makes model inputs from raw ones; see `ClientData`."""


def planned_steps(experiment: Experiment, samples: int, epochs: int | None, steps: int | None) -> int:
    """The number of steps of a client with so many samples; without `epochs` and `steps`, as the experiment says."""
    if steps is None and epochs is None:
        steps = experiment.local_steps
    if steps is None:
        sizes = minibatch_sizes(samples, experiment.batch_size, experiment.drop_last)
        steps = len(sizes) * (experiment.local_epochs if epochs is None else epochs)
    return steps


def minibatches(local: Local, samples: Samples, steps: int, preprocess: Preprocess) -> Iterator[Pair]:
    """The client's next minibatches, so many of them."""
    experiment, count, dtype = local.experiment, len(samples), local.theta.dtype
    sizes = minibatch_sizes(count, experiment.batch_size, experiment.drop_last)
    if not sizes:
        raise InputError(
            f"client {local.client} has {count} samples, fewer than batch_size={experiment.batch_size}, and "
            "drop_last leaves none: lower batch_size or unset drop_last"
        )
    order = streams.stream(experiment.seed, "batches", local.round, local.client)
    augment = streams.stream(experiment.seed, "augment", local.round, local.client)

    def ready(x: Any, y: Tensor) -> Pair:
        return _ready(preprocess, x, y, augment, dtype)

    while steps > 0:
        yield from _prepared(samples, order.permutation(count), sizes[:steps], ready)
        steps -= len(sizes)


def _ready(preprocess: Preprocess, x: Any, y: Tensor, stream: streams.Stream, dtype: torch.dtype) -> Pair:
    """Model inputs and targets; a preprocessing with a method `pair` first changes both together, as for masks."""
    joint = getattr(preprocess, "pair", None)
    if joint is not None:
        x, y = joint(x, y, stream)
    return preprocess(x, stream, dtype), y


def _prepared(
    samples: Samples, order: Tensor, sizes: list[int], ready: Callable[[Any, Tensor], Pair]
) -> Iterator[Pair]:
    """Minibatches of these sizes, in this order of positions; several small ones are prepared at once."""
    start, done, group = 0, 0, 1
    while done < len(sizes):
        now = sizes[done : done + group]
        stop = start + sum(now)
        x, y = samples.batch(order[start:stop])
        (x, y), start, done = ready(x, y), stop, done + len(now)
        if len(now) == 1 and isinstance(x, Tensor):
            group = max(1, BLOCK // max(1, x.numel()))
        if isinstance(samples, Ahead) and done < len(sizes):
            samples.ahead(order[start : start + sum(sizes[done : done + group])])
        if len(now) == 1:
            yield x, y
        else:
            yield from zip(torch.split(x, now), torch.split(y, now), strict=True)


@cache
def minibatch_sizes(count: int, batch_size: int, drop_last: bool) -> list[int]:
    """Sizes of the minibatches of one epoch.

    >>> minibatch_sizes(7, 3, drop_last=False)
    [3, 3, 1]
    """
    size = batch_size or count
    sizes = [size] * (count // size)
    return sizes if drop_last or count % size == 0 else [*sizes, count % size]


def pieces(batch: Batch, size: int) -> Iterator[tuple[Batch, float]]:
    """The minibatch in pieces of at most `size` samples, each with its share of the targets that count."""
    y = batch.targets[0][1]
    ends = [(start, min(start + size, len(y))) for start in range(0, len(y), size)]
    for (start, stop), share in zip(ends, _shares(y, ends), strict=True):
        if share:  # a loss of nothing is no number

            def cut(leaf: Any, start: int = start, stop: int = stop) -> Any:
                return leaf[start:stop] if isinstance(leaf, Tensor) else leaf

            targets = tuple((weight, cut(labels)) for weight, labels in batch.targets)
            yield Batch(map_inputs(cut, batch.x), targets), share


def _shares(y: Tensor, ends: list[tuple[int, int]]) -> list[float]:
    if y.dim() < 2 or y.is_floating_point():
        return [(stop - start) / len(y) for start, stop in ends]
    counts = torch.stack([(y[start:stop] != IGNORED).sum() for start, stop in ends]).tolist()
    return [count / max(1, sum(counts)) for count in counts]
