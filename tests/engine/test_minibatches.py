"""Minibatches of a stack are those of its clients, one by one, filled up and gathered at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedflat import Experiment, Federation
from fedflat.core import streams
from fedflat.core.samples import IGNORED
from fedflat.data.preprocess import Preprocess
from fedflat.data.samples import TensorSamples
from fedflat.data.several import Several
from fedflat.engine.minibatches import lockstep, minibatches, planned_steps


def view(experiment: Experiment, *clients: int) -> Any:
    theta = torch.zeros(1)
    return SimpleNamespace(experiment=experiment, round=3, client=clients[0], numbers=clients, theta=theta)


def clients(kind: str) -> Federation:
    x, y = torch.arange(40.0).view(40, 1), torch.arange(40)
    parts = torch.arange(40).split([13, 4, 9, 1, 13])
    one = kind == "one pool"
    found = Federation([TensorSamples(x, y, part) if one else TensorSamples(x[part], y[part]) for part in parts])
    if kind == "copied into one":
        found.pool()
    return found


@pytest.mark.parametrize("kind", ["one pool", "tensors of their own", "copied into one"])
@pytest.mark.parametrize(
    ("batch_size", "epochs", "steps", "drop_last"),
    [(4, 1, None, False), (5, 3, None, False), (0, 2, None, False), (1, 2, None, True), (4, 1, 7, False)],
)
def test_a_stack_has_the_minibatches_of_its_clients(
    kind: str, batch_size: int, epochs: int, steps: int | None, drop_last: bool
) -> None:
    """Ragged sizes, several epochs, more steps than minibatches. A client that has finished repeats its last one."""
    experiment = Experiment(batch_size=batch_size, local_epochs=epochs, local_steps=steps, drop_last=drop_last)
    data, preprocess = Several(clients(kind), range(5)), Preprocess()
    planned = [planned_steps(experiment, len(own), None, None) for own in data]
    federation, model = SimpleNamespace(preprocess=preprocess), SimpleNamespace(theta=torch.zeros(1))
    setup: Any = SimpleNamespace(experiment=experiment, federation=federation, model=model)
    alone = [list(minibatches(setup, 3, i, own, planned[i])) for i, own in enumerate(data)]
    found = lockstep(view(experiment, *range(5)), data, planned, preprocess)
    assert found is not None
    count = 0
    for k, (batch, sizes) in enumerate(found):
        ((_, labels),), count = batch.targets, count + 1
        for i, own in enumerate(alone):
            x, y = own[min(k, len(own) - 1)]
            assert sizes[i] == (len(y) if k < len(own) else 0)
            assert batch.x[i, : len(y)].equal(x) and labels[i, : len(y)].equal(y)
            assert (labels[i, len(y) :] == IGNORED).all() and (batch.x[i, len(y) :] == x[0]).all()
    assert count == max(planned)


def test_augmented_data_are_left_to_the_clients_own_streams() -> None:
    x, y = torch.zeros(6, 3, 8, 8, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
    samples = Several(Federation([(x, y)] * 2), range(2))
    local = view(Experiment(batch_size=3), 0, 1)
    assert lockstep(local, samples, [2, 2], Preprocess(flip=0.5)) is None
    assert lockstep(local, samples, [2, 2], Preprocess()) is not None


def test_permutations_of_many_streams_are_those_of_each() -> None:
    counts, times = [1 + client for client in range(40)], [1 + client % 3 for client in range(40)]
    found = streams.permutations(counts, times, 5, "batches", 2, range(40))
    for client, (rows, count, often) in enumerate(zip(found, counts, times, strict=True)):
        own = streams.stream(5, "batches", 2, client)
        for row in rows[:often]:
            assert own.permutation(count).tolist() == row[:count].tolist()
