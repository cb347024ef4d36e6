"""Clients trained one round further from where a run stands."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers import flat, network, plain, same, world

import fedflat
from fedflat.analysis.signal import gsnr
from fedflat.studies.clients import client_table, local_models


def first_two_then_the_last(t: int) -> list[int]:
    return [0, 1] if t < 2 else [2]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedavg+sam", "fedavg+const", "fedprox+mofedsam"])
def test_a_client_goes_where_a_further_round_of_it_alone_takes_the_server(method: str) -> None:
    data, e = world(), plain(method=method, rounds=2, lr_decay=0.5)
    short, long = (
        fedflat.run(e.replace(rounds=n), federation=data, model=network(), participants=first_two_then_the_last)
        for n in (2, 3)
    )
    before = short.server_weights, short.server_state, [short.client_state(i) for i in range(3)]
    (model,) = local_models(short, data, [2])
    assert torch.allclose(flat(model), long.server_weights, rtol=0, atol=1e-12)
    assert not torch.allclose(flat(model), short.server_weights, rtol=0, atol=1e-3)
    assert same(before[0], short.server_weights) and same(before[1], short.server_state)
    assert all(same(state, short.client_state(i)) for i, state in enumerate(before[2]))


def test_identical_clients_agree_in_everything() -> None:
    x, y = world().samples(1).batch(torch.arange(10))
    data = fedflat.Federation([(x, y)] * 3)
    run = fedflat.run(plain(rounds=2, batch_size=0), federation=data, model=network())
    found = client_table(run, data, [0, 1, 2], [(x, y)] * 3)
    assert found.curvature.norm == pytest.approx(0, abs=1e-20) and found.curvature.direction == pytest.approx(1)
    assert float(found.lines.barrier.max()) == pytest.approx(0, abs=1e-12)
    assert found.first == pytest.approx([gsnr(run.model, (x, y)).total] * 3)
    assert found.last[0] == found.last[1] != found.first[0]


class Threads(torch.nn.Module):
    """Notes with how many threads it computes."""

    seen: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(torch.get_num_threads())
        return self.inner(x)


def test_clients_train_with_one_thread_as_in_the_run() -> None:
    data = world()
    run = fedflat.run(plain(rounds=1), federation=data, model=Threads())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    local_models(run, data, [1])
    assert Threads.seen == {1} and torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_a_client_that_diverges_is_named() -> None:
    data = world()
    run = fedflat.run(plain(rounds=1), federation=data, model=network())
    run._state.server.theta.fill_(float("nan"))
    with pytest.raises(fedflat.InputError, match="client 1 diverges"):
        local_models(run, data, [1])
