"""Randomness is a function of (seed, purpose, ids), and the global generators stay as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_run, blobs, plain, restless, same, world
from torch import Tensor, nn

import fedflat
from fedflat import Federation
from fedflat.core import streams


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, keys.tolist(), *rest), random.getstate()


def test_a_stream_is_named_by_seed_purpose_and_ids() -> None:
    names = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a", 0),
        (0, "a", 1),
        (0, "a", 1, 2),
        (0, "a", 12),
        (-1, "a"),
        (0, "a1"),
        (0, "a/1"),
    ]
    assert len({streams.key(*name) for name in names}) == len(names)
    for name in names:
        assert torch.equal(streams.stream(*name).normal(4), streams.stream(*name).normal(4))
        assert streams.numpy_stream(*name).integers(1 << 40) == streams.numpy_stream(*name).integers(1 << 40)


def test_streams_of_a_million_clients_do_not_collide() -> None:
    keys = {streams.key(0, "batches", 1, client) for client in range(100_000)}
    assert len(keys) == 100_000
    assert min(keys) >= 0 and 1 << 127 < max(keys) < 1 << 128


def test_a_stream_is_philox_under_all_bits_of_its_key() -> None:
    raw = np.random.Philox(key=streams.key(3, "sampling", 5)).random_raw(8)
    assert (streams.numpy_stream(3, "sampling", 5).bit_generator.random_raw(8) == raw).all()


def test_torch_reads_its_global_generator_from_all_of_the_given_state() -> None:
    """PyTorch's and NumPy's Mersenne Twisters with the same 624 words give the same 32-bit numbers."""
    words = np.random.Philox(key=streams.key(0, "model", 1, 2)).random_raw(624) >> 32
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    with streams.isolated(0, "model", 1, 2):
        drawn = torch.empty(2000, dtype=torch.int64).random_(0, 1 << 16)
    assert drawn.tolist() == (twister.random_raw(2000) % (1 << 16)).tolist()


def test_draws_have_the_asked_form_and_law() -> None:
    def fresh() -> streams.Stream:
        return streams.stream(0, "tests")

    assert fresh().permutation(9).sort().values.tolist() == list(range(9))
    sample = fresh().sample(10**12, 5)
    assert len(set(sample.tolist())) == 5 and sample.dtype == torch.int64
    assert set(fresh().integers(4, (50, 2), torch.uint8).flatten().tolist()) == {0, 1, 2, 3}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        uniform, normal = fresh().uniform((100, 100), dtype), fresh().normal((100, 100), dtype)
        assert uniform.dtype == normal.dtype == dtype
        assert uniform.min() >= 0 and uniform.max() <= 1 and abs(uniform.double().mean() - 0.5) < 0.02
        assert abs(normal.double().mean()) < 0.05 and abs(normal.double().std() - 1) < 0.05
    assert fresh().normal(()).shape == ()


def test_isolated_gives_the_same_draws_and_puts_the_generator_back() -> None:
    before, drawn = generators(), []
    for _ in range(2):
        with pytest.raises(KeyError), streams.isolated(3, "model", 1, 2):
            drawn.append(torch.rand(5))
            raise KeyError
        torch.testing.assert_close(torch.get_rng_state(), torch.tensor(before[0], dtype=torch.uint8))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("backend", ["serial", "pool"])
@pytest.mark.parametrize("network", ["given", "built"])
def test_a_run_leaves_the_global_generators_as_it_found_them(backend: str, network: str) -> None:
    before = generators()
    exp = plain(backend=backend, workers=2, model="mlp", rounds=2, participation="bernoulli(0.7)")
    fedflat.run(exp, federation=world(), model=restless() if network == "given" else None)
    assert generators() == before


def test_the_global_generators_do_not_reach_a_run() -> None:
    first = fedflat.run(plain(model="mlp"), federation=world())
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)
    assert_same_run(first, fedflat.run(plain(model="mlp"), federation=world()), 3)


class Jittered(torch.utils.data.Dataset):
    """A dataset that augments with whatever generator is at hand, as many of the world's do."""

    def __init__(self, source: str, client: int) -> None:
        self.source, (self.x, self.y) = source, blobs(8, seed=client)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        draw = {"torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "python": random.random}
        return self.x[i] + draw[self.source](), int(self.y[i])


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_data_that_draw_from_a_global_generator_are_reproducible_and_leave_it_alone(source: str) -> None:
    federation = Federation([Jittered(source, i) for i in range(3)], test=Jittered(source, 9))
    runs = []
    for backend in ("serial", "serial", "pool"):
        before = generators()
        runs.append(fedflat.run(plain(backend=backend, workers=2, model="mlp", rounds=2), federation=federation))
        assert generators() == before
    assert_same_run(runs[0], runs[1], 3)
    assert_same_run(runs[0], runs[2], 3)


class Noisy(nn.Module):
    """Draws in evaluation too (Monte-Carlo dropout)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, training=True)


def test_a_model_that_draws_in_evaluation_is_reproducible_too() -> None:
    runs = []
    for backend in ("serial", "serial", "pool"):
        before = generators()
        exp = plain(backend=backend, workers=2, rounds=2)
        runs.append(fedflat.run(exp, federation=world(), model=seeded_noisy()))
        assert generators() == before
    assert_same_run(runs[0], runs[1], 3)
    assert_same_run(runs[0], runs[2], 3)


def seeded_noisy() -> nn.Module:
    with streams.isolated(0, "tests"):
        return Noisy()


def test_dropout_differs_by_seed_round_and_client_and_not_otherwise() -> None:
    full = plain(batch_size=0, lr=0.5, rounds=1)
    twins = Federation([blobs(8, seed=0), blobs(8, seed=0)])

    def trained(client: int, **changes: Any) -> Tensor:
        exp = full.replace(**changes)
        return fedflat.run(exp, federation=twins, model=restless(), participants=lambda t: [client]).server_weights

    assert same(trained(0), trained(0))
    assert not same(trained(0), trained(1))
    assert not same(trained(0), trained(0, seed=1))


def test_a_clients_round_does_not_depend_on_who_else_takes_part() -> None:
    federation, seen = world((8, 8, 8, 8)), {}
    for group in ([2], [0, 2], [3, 2, 1], [2, 0, 1, 3]):
        run = fedflat.run(plain(), federation=federation, model=restless(), participants=lambda t, group=group: group)
        row = next(row for row in run.clients if row["client"] == 2)
        seen[tuple(group)] = row["loss"], row["update_norm"], row["steps"]
    assert len(set(seen.values())) == 1
