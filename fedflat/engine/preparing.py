"""Minibatches of several small clients, made ahead of their training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch

from fedflat.core import streams
from fedflat.core.samples import Samples
from fedflat.data.samples import TensorSamples, together
from fedflat.engine.minibatches import BLOCK, MOST, Pair, minibatch_sizes, minibatches, planned_steps
from fedflat.engine.setup import Setup
from fedflat.experiment import Experiment


@contextmanager
def prepared(setup: Setup, round: int, clients: Sequence[int]) -> Iterator[None]:
    """Inside this block the minibatches of these clients are ready, where that is possible.

    Many clients of few samples train faster this way: one kind of work after the other keeps its code in the cache of
    the processor, and one gather serves several clients. Only tensors are prepared, and only where nothing draws but
    the order of samples.
    """
    if len(clients) > 1 and setup.draws is False and not getattr(setup.federation.preprocess, "draws", True):
        try:
            for group in _groups(setup, clients):
                setup.ahead.update(_made(setup, round, group))
        except Exception:  # it comes again, and is told with the client's number, when the client trains
            setup.ahead.clear()
    try:
        yield
    finally:
        setup.ahead.clear()


def _groups(setup: Setup, clients: Sequence[int]) -> Iterator[dict[int, TensorSamples]]:
    """The first of the clients with their data, so many at a time that their minibatches fit into the cache."""
    group, numbers, room = dict[int, TensorSamples](), 0, MOST
    for client in clients:
        samples = setup.federation.samples(client)
        if not isinstance(samples, TensorSamples):
            break
        own = _numbers(setup.experiment, samples)
        room -= own
        if room < 0:
            break
        if group and numbers + own > BLOCK:
            yield group
            group, numbers = {}, 0
        group[client] = samples
        numbers += own
    if group:
        yield group


def _numbers(experiment: Experiment, samples: TensorSamples) -> int:
    """How many numbers the minibatches of a client have."""
    size = min(len(samples), experiment.batch_size or len(samples))
    return samples.width * size * planned_steps(experiment, len(samples), None, None)


def _made(setup: Setup, round: int, group: Mapping[int, TensorSamples]) -> dict[int, tuple[Samples, list[Pair]]]:
    """The minibatches that `minibatches` gives for each of the clients; gathered at once if their data are alike."""
    e, counts = setup.experiment, [len(samples) for samples in group.values()]
    steps = [planned_steps(e, count, None, None) for count in counts]
    sizes = [minibatch_sizes(count, e.batch_size, e.drop_last) for count in counts]
    whole = together(list(group.values()), MOST) if len(group) > 1 and all(sizes) else None
    if whole is None or hasattr(setup.federation.preprocess, "pair"):
        return {
            client: (samples, list(minibatches(setup, round, client, samples, count)))
            for (client, samples), count in zip(group.items(), steps, strict=True)
        }
    each = [(own * -(-count // len(own)))[:count] for own, count in zip(sizes, steps, strict=True)]
    places = _places(e, round, list(group), counts, list(map(sum, sizes)), list(map(sum, each)))
    x, y = whole.batch(torch.from_numpy(places))
    x, now = setup.federation.preprocess(x, None, setup.model.theta.dtype), list(chain(*each))
    pairs = iter(zip(x.split_with_sizes(now), y.split_with_sizes(now), strict=True))
    return {
        client: (samples, [next(pairs) for _ in own])
        for (client, samples), own in zip(group.items(), each, strict=True)
    }


def _places(
    e: Experiment, round: int, clients: Sequence[int], counts: list[int], per_epoch: list[int], used: list[int]
) -> np.ndarray:
    """Positions among the samples of all clients, in the order of training.

    Args:
        e: The experiment.
        round: The round.
        clients: The clients.
        counts: How many samples each of them has.
        per_epoch: How many of them it uses in one epoch.
        used: How many samples it uses in all.
    """
    epochs = [-(-total // own) for total, own in zip(used, per_epoch, strict=True)]
    orders = streams.permutations(counts, epochs, e.seed, "batches", round, clients)
    start = np.cumsum(counts) - counts
    epoch, place = np.arange(orders.shape[1])[:, None], np.arange(orders.shape[2])
    own, total = np.array(per_epoch)[:, None, None], np.array(used)[:, None, None]
    found: np.ndarray = (orders + start[:, None, None])[(place < own) & (epoch * own + place < total)]
    return found
