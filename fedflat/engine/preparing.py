"""Minibatches of several small clients, made ahead of their training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedflat.core.samples import Samples
from fedflat.data.samples import TensorSamples
from fedflat.engine.minibatches import MOST, minibatches, planned_steps
from fedflat.engine.setup import Setup
from fedflat.experiment import Experiment


@contextmanager
def prepared(setup: Setup, round: int, clients: Sequence[int]) -> Iterator[None]:
    """Inside this block the minibatches of these clients are ready, where that is possible.

    Many clients of few samples train faster this way: one kind of work after the other keeps its code in the cache of
    the processor. Only tensors are prepared, and only where nothing draws but the order of samples.
    """
    ahead, room = setup.ahead, MOST
    if len(clients) > 1 and setup.draws is False and not getattr(setup.federation.preprocess, "draws", True):
        for client in clients:
            try:
                samples = setup.federation.samples(client)
                steps = planned_steps(setup.experiment, len(samples), None, None)
                room -= _numbers(setup.experiment, samples, steps)
                if room < 0:
                    break
                ahead[client] = samples, list(minibatches(setup, round, client, samples, steps))
            except Exception:  # it comes again, and is told with the client's number, when the client trains
                break
    try:
        yield
    finally:
        ahead.clear()


def _numbers(experiment: Experiment, samples: Samples, steps: int) -> int:
    """How many numbers so many minibatches have; more than `MOST` if that is unknown."""
    size = min(len(samples), experiment.batch_size or len(samples))
    return samples.width * size * steps if isinstance(samples, TensorSamples) else MOST + 1
