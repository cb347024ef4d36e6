"""A run as something to look at: its model, and some of its data as the model gets them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import streams
from fedflat.data import Federation, load_federation
from fedflat.errors import InputError
from fedflat.result import Run, load_run

log = logging.getLogger(__name__)
Pair = tuple[Tensor, Tensor]
CROSS_ENTROPY = F.cross_entropy.__name__


@dataclass(frozen=True)
class Subject:
    """A run to look at: its evaluated model, and some of its training and test data as the model gets them.

    federation: all of its data. seed: of the choice of the samples.
    """

    run: Run
    model: nn.Module
    train: Pair
    test: Pair | None
    federation: Federation
    seed: int = 0

    def require_test(self, what: str) -> Pair:
        """The test data, or an error that says which analysis needs them."""
        if self.test is None:
            raise InputError(f"{what} needs test data, which the data set of {self.run.out} lacks")
        return self.test


def subject(
    run: Run | str | Path,
    *,
    federation: Federation | None = None,
    root: str | Path | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> Subject:
    """A run with some of its data. federation: the data it was run on, if they were your own."""
    loaded = run if isinstance(run, Run) else load_run(run)
    _warn(loaded)
    if federation is None:
        e = loaded.experiment
        federation = load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)
        if loaded._inputs and loaded._inputs["data"] != federation.fingerprint():
            raise InputError(
                f"{loaded.out} was run on other data than {e.data!r} here, perhaps your own: call the functions of "
                "fedflat.analysis with them, or subject(run, federation=…)"
            )
    dtype = getattr(torch, loaded.experiment.dtype)
    test = None if federation.test is None else some(federation, [federation.test], samples, seed, dtype)
    trained = range(len(federation) - loaded.experiment.new_clients)
    train = some(federation, [federation.samples(client) for client in trained], samples, seed, dtype)
    return Subject(loaded, loaded.model, train, test, federation, seed)


def _warn(run: Run) -> None:
    """Say what a reader of the figures would not expect."""
    done, rounds = len(run.metrics), run.experiment.rounds
    if done < rounds and not run.stopped:
        log.warning("%s is not finished: it is looked at after round %d of %d", run.out, done, rounds)
    trained = run._inputs.get("loss", CROSS_ENTROPY)
    if trained != CROSS_ENTROPY and run._task.criterion is F.cross_entropy:  # a folder does not hold its function
        log.warning("%s was trained with the loss %r, and is looked at with cross-entropy", run.out, trained)


def some(federation: Federation, sets: Sequence[Any], count: int, seed: int, dtype: torch.dtype) -> Pair:
    """A fixed random subset of all samples, in order, as the model gets them in evaluation."""
    ends = np.cumsum([len(each) for each in sets])
    stream = streams.numpy_stream(seed, "analysis")
    chosen = np.sort(stream.choice(ends[-1], min(count, int(ends[-1])), replace=False))
    owner = np.searchsorted(ends, chosen, side="right")
    xs, ys = [], []
    for place in np.unique(owner).tolist():
        positions = chosen[owner == place] - (ends[place - 1] if place else 0)
        x, y = sets[place].batch(torch.from_numpy(positions))
        xs.append(federation.preprocess(x, None, dtype))
        ys.append(y)
    return torch.cat(xs), torch.cat(ys)
