"""A run with its evaluated model and some of its data, the input of an analysis."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import streams
from fedflat.core.devices import CPU
from fedflat.core.inputs import concatenated
from fedflat.data import Federation, federation_of, load_pool
from fedflat.data.arrays import Pool
from fedflat.errors import InputError
from fedflat.runs.result import Run, load_run

log = logging.getLogger(__name__)
Pair = tuple[Any, Tensor]
CROSS_ENTROPY = F.cross_entropy.__name__


@dataclass(frozen=True)
class RunData:
    """A run with its evaluated model and some of its training and test data, preprocessed for the model.

    Attributes:
        federation: All of its data.
        seed: Seed of the choice of the samples.
        test_set: All of the test data that `test` was chosen from.
        device: Where the model is and is analysed.
    """

    run: Run
    model: nn.Module
    train: Pair
    test: Pair | None
    federation: Federation
    seed: int = 0
    test_set: Any = None
    device: torch.device = CPU

    def on(self, device: torch.device) -> RunData:
        """The same with a copy of the model on a device."""
        return replace(self, model=copy.deepcopy(self.model).to(device), device=device) if device != CPU else self

    def require_test(self, what: str) -> Pair:
        """The test data, or an error that names the analysis that needs it."""
        if self.test is None:
            raise InputError(f"{what} needs test data, but the data set of {self.run.out} has none")
        return self.test

    def raw_test(self, what: str) -> Pair:
        """All test data before preprocessing, in order; `what` as in `require_test`."""
        self.require_test(what)
        return some(self.federation, [self.test_set], len(self.test_set), self.seed, raw=True)


def run_data(
    run: Run | str | Path,
    *,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    root: str | Path | None = None,
    samples: int = 2000,
    seed: int = 0,
    pools: dict[str, Pool | Federation] | None = None,
) -> RunData:
    """A run with some of its data.

    Args:
        model: The module of the run, if it was your own and `run` is a folder.
        federation: The data of the run, if they were your own.
        root: Folder of the data sets.
        samples: Number of training samples, and of test samples, to take.
        seed: Seed of the choice of the samples.
        pools: Data sets already read, by name; data sets read now are added.
    """
    loaded = run if isinstance(run, Run) else load_run(run, model)
    _warn(loaded)
    if federation is None:
        e, inputs = loaded.experiment, loaded._state.inputs
        if inputs.get("custom_data"):
            raise _other_data(loaded)
        pools = {} if pools is None else pools
        if e.data not in pools:
            pools[e.data] = load_pool(e.data, root)
        pool = pools[e.data]
        federation = federation_of(pool, e.data, e.partition, e.clients, e.seed, e.augment, e.local_holdout)
        if inputs and inputs["data"] != federation.fingerprint():
            raise _other_data(loaded)
    dtype = getattr(torch, loaded.experiment.dtype)
    test = None if federation.test is None else some(federation, [federation.test], samples, seed, dtype)
    trained = range(len(federation) - loaded.experiment.new_clients)
    train = some(federation, [federation.samples(client) for client in trained], samples, seed, dtype)
    return RunData(loaded, loaded.model, train, test, federation, seed, federation.test)


def _other_data(run: Run) -> InputError:
    data = "your own data" if run._state.inputs.get("custom_data") else f"other data than {run.experiment.data!r} here"
    return InputError(
        f"{run.out} was run on {data}: call the functions of fedflat.analysis with it, or run_data(run, federation=…), "
        "or say what makes them: fedflat analyze --federation MODULE:FUNCTION"
    )


def _warn(run: Run) -> None:
    """Warn of what a reader of the results would not expect."""
    done, rounds = len(run.metrics), run.experiment.rounds
    if done < rounds and not run.stopped:
        log.warning("%s is not finished: the analysis uses its state after round %d of %d", run.out, done, rounds)
    trained = run._state.inputs.get("loss", CROSS_ENTROPY)
    if trained != CROSS_ENTROPY and run._state.setup.criterion is F.cross_entropy:  # a folder cannot hold a function
        log.warning("%s was trained with the loss %r, but the analysis uses cross-entropy", run.out, trained)


def some(
    federation: Federation,
    sets: Sequence[Any],
    count: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    raw: bool = False,
) -> Pair:
    """A fixed random subset of `count` samples, in order, preprocessed as in evaluation; `raw` leaves that out."""
    ends = np.cumsum([len(each) for each in sets])
    stream = streams.numpy_stream(seed, "analysis")
    chosen = np.sort(stream.choice(ends[-1], min(count, int(ends[-1])), replace=False))
    owner = np.searchsorted(ends, chosen, side="right")
    xs, ys = [], []
    for place in np.unique(owner).tolist():
        positions = chosen[owner == place] - (ends[place - 1] if place else 0)
        x, y = sets[place].batch(torch.from_numpy(positions))
        xs.append(x if raw else federation.preprocess(x, None, dtype))
        ys.append(y)
    return concatenated(xs), torch.cat(ys)


def client_data(data: RunData, client: int, samples: int) -> RunData:
    """A client's own model with its own training and test data, instead of the common ones.

    Raises:
        InputError: There is no such client, or the method keeps no model for it.
    """
    federation, run = data.federation, data.run
    model = run.personal(client)
    dtype = getattr(torch, run.experiment.dtype)
    own = federation.client_test(client)
    test = None if own is None else some(federation, [own], samples, data.seed, dtype)
    train = some(federation, [federation.samples(client)], samples, data.seed, dtype)
    return RunData(run, model, train, test, federation, data.seed, own)
