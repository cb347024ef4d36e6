"""The minibatches of a client: the order of its samples, and inputs prepared for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.devices import on
from fedflat.core.inputs import map_inputs
from fedflat.core.samples import IGNORED, Samples
from fedflat.core.views import Batch, Local, SetupView
from fedflat.data.preprocess import Preprocess
from fedflat.data.samples import Ahead, TensorSamples
from fedflat.data.several import Several
from fedflat.errors import InputError
from fedflat.experiment import Experiment

BLOCK = 3 << 18  # numbers preprocessed at once: large enough to spread fixed costs, small enough for the cache
MOST = 1 << 22  # numbers that a stack of clients copies, or positions that it keeps
Pair = tuple[Any, Tensor]
"""Inputs and labels of one minibatch."""
Prepares = Callable[[Any, streams.Stream | None, torch.dtype], Any]
"""Makes model inputs from raw ones; see `ClientData`."""


def planned_steps(experiment: Experiment, samples: int, epochs: int | None, steps: int | None) -> int:
    """The number of steps of a client with so many samples; without `epochs` and `steps`, as the experiment says."""
    if steps is None and epochs is None:
        steps = experiment.local_steps
    if steps is None:
        sizes = minibatch_sizes(samples, experiment.batch_size, experiment.drop_last)
        steps = len(sizes) * (experiment.local_epochs if epochs is None else epochs)
    return steps


def minibatches(setup: SetupView, round: int, client: int, samples: Samples, steps: int) -> Iterator[Pair]:
    """So many minibatches of a client in a round."""
    experiment, preprocess, count = setup.experiment, setup.federation.preprocess, len(samples)
    sizes, dtype = minibatch_sizes(count, experiment.batch_size, experiment.drop_last), setup.model.theta.dtype
    if not sizes:
        raise InputError(
            f"client {client} has {count} samples, fewer than batch_size={experiment.batch_size}, and "
            "drop_last leaves none: lower batch_size or unset drop_last"
        )
    name = experiment.seed, "batches", round, client
    orders = (
        streams.stream(*name).permutations(count) if steps > len(sizes) else iter([streams.permutation(count, *name)])
    )
    augment = streams.stream(experiment.seed, "augment", round, client)
    group = _group(samples, sizes[0])

    def ready(x: Any, y: Tensor) -> Pair:
        return _ready(preprocess, x, y, augment, dtype)

    while steps > 0:
        now = sizes[:steps]
        if group and type(preprocess) is Preprocess and preprocess.draws:
            yield from _augmented(samples, next(orders), now, group, preprocess, augment, dtype)
        else:
            together = group if group and not getattr(preprocess, "draws", True) else 1
            yield from _prepared(samples, next(orders), now, ready, together)
        steps -= len(sizes)


def _group(samples: Samples, size: int) -> int:
    """How many minibatches are prepared at once; 0 where that is not known before the first."""
    return max(1, BLOCK // max(1, samples.width * size)) if isinstance(samples, TensorSamples) else 0


def _ready(preprocess: Prepares, x: Any, y: Tensor, stream: streams.Stream, dtype: torch.dtype) -> Pair:
    """Model inputs and targets; a preprocessing with a method `pair` first changes both together, as for masks."""
    joint = getattr(preprocess, "pair", None)
    if joint is not None:
        x, y = joint(x, y, stream)
    return preprocess(x, stream, dtype), y


def _prepared(
    samples: Samples, order: Tensor, sizes: list[int], ready: Callable[[Any, Tensor], Pair], group: int
) -> Iterator[Pair]:
    """Minibatches of these sizes, in this order of positions; several small ones are prepared at once.

    How many at once decides what augmentation draws. It is 1 for the first ones then, and `group` where nothing draws.
    """
    start, done = 0, 0
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
            yield from zip(x.split_with_sizes(now), y.split_with_sizes(now), strict=True)


def _augmented(
    samples: Samples,
    order: Tensor,
    sizes: list[int],
    group: int,
    preprocess: Preprocess,
    stream: streams.Stream,
    dtype: torch.dtype,
) -> Iterator[Pair]:
    """The minibatches of `_prepared`, where all is drawn before: the first one then waits for others, which is cheaper.

    The draws are those of `_prepared`, for the first minibatch and then for `group` at once.
    """
    draws, start = preprocess.draw(map(sum, _cut(sizes, 1, group)), stream), 0
    for now in _cut(sizes, group + (group > 1), group):
        stop = start + sum(now)
        x, y = samples.batch(order[start:stop])
        x, start = preprocess.prepared(x, draws[start:stop], dtype), stop
        yield from zip(x.split_with_sizes(now), y.split_with_sizes(now), strict=True)


def _cut(sizes: list[int], first: int, others: int) -> Iterator[list[int]]:
    """The list in parts: so many first, then so many at a time."""
    yield sizes[:first]
    for start in range(first, len(sizes), others):
        yield sizes[start : start + others]


def lockstep(
    local: Local, samples: Several, planned: Sequence[int], preprocess: Prepares, alike: bool = False
) -> Iterator[tuple[Batch, list[int]]] | None:
    """The `minibatches` of several clients as one for every step, and how many samples of each client are in it.

    The samples of all clients are gathered at once. A shorter minibatch is filled up with its own first sample, under
    the label `IGNORED`. A client that has finished repeats its last minibatch, and its size is 0. None where this
    cannot be done: data are no tensors, or too large, or augmented. If samples are treated `alike` wherever they are in
    a minibatch, a client whose minibatches have all of its samples keeps them in their order, which saves time.
    """
    together, plan = samples.joint(MOST), _Plan(local.experiment, samples.sizes, planned)
    if together is None or plan.numbers > MOST or not plan.possible:
        return None
    places, own = plan.places(plan.orders(local, alike))
    nobody, dtype = streams.NoStream(), local.theta.dtype

    def ready(start: int, stop: int) -> Pair:
        x, y = together.batch(torch.from_numpy(places[start:stop].reshape(-1)))
        return _ready(preprocess, x, y, nobody, dtype)

    try:
        first = ready(0, 1)
    except streams.DrawnError:  # each client has its own stream for that
        return None
    return _steps(plan, own, first, ready) if isinstance(first[0], Tensor) else None


def _steps(
    plan: _Plan, own: np.ndarray, first: Pair, ready: Callable[[int, int], Pair]
) -> Iterator[tuple[Batch, list[int]]]:
    """The minibatches of `lockstep`; several small ones are prepared at once."""
    (x, y), start, stop, sizes = first, 0, 1, plan.sizes
    while True:
        shape = (stop - start, *own.shape[1:])
        x, y = x.view(*shape, *x.shape[1:]), y.view(*shape, *y.shape[1:])
        for k in range(start, stop):
            width, inputs, labels = plan.widths[k], x[k - start], y[k - start]
            if width < len(own[k][0]):
                inputs, labels = inputs[:, :width], labels[:, :width]
            if not own[k, :, :width].all():
                filled = on(torch.from_numpy(~own[k, :, :width]), y.device)
                labels = labels.masked_fill(filled.view(*filled.shape, *[1] * (y.dim() - 3)), IGNORED)
            yield Batch(inputs, ((1.0, labels),)), sizes[k]
        if stop == len(own):
            return
        start, stop = stop, min(len(own), stop + max(1, BLOCK // max(1, x[0].numel())))
        x, y = ready(start, stop)


class _Plan:
    """Which samples of clients with so many samples are in which minibatch."""

    def __init__(self, experiment: Experiment, counts: list[int], planned: Sequence[int]) -> None:
        self.counts, steps = counts, np.asarray(planned)
        count = np.asarray(counts)
        self._width = np.minimum(count, experiment.batch_size or count)  # of a full minibatch
        self._per_epoch = count // self._width if experiment.drop_last else -(-count // self._width)
        self.possible = bool((steps > 0).all()) and not (experiment.drop_last and (count < experiment.batch_size).any())
        self.numbers, self._epochs = int(steps.max() * self._width.max() * len(counts)), -(-steps // self._per_epoch)
        k = np.arange(steps.max())[:, None]
        self._step = np.minimum(k, steps - 1)  # a client that has finished repeats its last minibatch
        self._start = self._step % self._per_epoch * self._width
        self._size = np.minimum(self._width, count - self._start)
        self.sizes, self.widths = np.where(k < steps, self._size, 0), self._size.max(1).tolist()

    def orders(self, local: Local, alike: bool) -> np.ndarray:
        """The order of each client's samples in every epoch; see `lockstep`."""
        drawn = np.flatnonzero((self._width < self.counts) | (not alike))
        found = np.empty((len(self.counts), self._epochs.max(), max(self.counts)), np.int64)
        found[:] = np.arange(found.shape[2])
        if len(drawn):
            counts, epochs, name = (
                np.asarray(self.counts)[drawn],
                self._epochs[drawn],
                (local.experiment.seed, "batches"),
            )
            own = streams.permutations(
                counts.tolist(), epochs.tolist(), *name, local.round, [local.numbers[i] for i in drawn.tolist()]
            )
            found[drawn, : own.shape[1], : own.shape[2]] = own
        return found

    def places(self, orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions among all samples, steps × clients × samples, and which of them do not fill up a minibatch.

        Args:
            orders: The order of each client's samples in every epoch.
        """
        within = np.arange(self._width.max())
        own = within < self._size[:, :, None]
        columns = self._start[:, :, None] + np.where(own, within, 0)
        rows = np.arange(len(self.counts))[:, None]
        found = orders[rows, (self._step // self._per_epoch)[:, :, None], columns]
        return found + (np.cumsum(self.counts) - self.counts)[:, None], own


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
