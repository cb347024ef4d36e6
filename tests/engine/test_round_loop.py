"""The round loop: FedAvg's identities, buffers, clients that are lost, and sums in one fixed order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Diary, assert_same_run, blobs, flat, network, plain, restless, world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Federation, Part, Server
from fedflat.core.sums import TreeSum, sum_of_rows
from fedflat.core.views import Update
from fedflat.engine.assembly import make_setup
from fedflat.engine.backends.serial import Serial
from fedflat.engine.round_loop import RoundLoop
from fedflat.engine.setup import Broadcast, Job, fresh_server
from fedflat.errors import RoundLostError
from fedflat.runs.store import ClientStore

SIZES = (5, 7, 12)


def local_models(exp: fedflat.Experiment, federation: Federation, model: nn.Module) -> list[Tensor]:
    """y_i of the first round: what comes of it when client i trains alone."""
    return [
        fedflat.run(exp, federation=federation, model=model, participants=lambda t, i=i: [i]).server_weights
        for i in range(len(federation))
    ]


def test_one_full_batch_step_of_everybody_is_gradient_descent_on_the_mean_loss() -> None:
    exp = plain(rounds=5, batch_size=0, lr=0.7, weighting="uniform")
    run, model = fedflat.run(exp, federation=world(SIZES), model=network()), network()
    for _ in range(5):
        losses = [F.cross_entropy(model(x), y) for x, y in (blobs(n, seed=i) for i, n in enumerate(SIZES))]
        gradient = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, g in zip(model.parameters(), gradient, strict=True):
                parameter -= 0.7 * g
    assert torch.allclose(run.server_weights, flat(model), rtol=0, atol=1e-13)


def test_one_full_batch_step_weighted_by_samples_is_gradient_descent_on_all_data() -> None:
    run = fedflat.run(plain(batch_size=0, lr=0.7), federation=world(SIZES), model=network())
    x, y = (torch.cat([blobs(n, seed=i)[k] for i, n in enumerate(SIZES)]) for k in (0, 1))
    pooled = fedflat.run(plain(batch_size=0, lr=0.7), federation=Federation([(x, y)]), model=network())
    assert torch.allclose(run.server_weights, pooled.server_weights, rtol=0, atol=1e-14)


def test_clients_with_the_same_data_average_to_any_one_of_them() -> None:
    exp = plain(rounds=3, batch_size=0, local_epochs=4, lr=0.5, momentum=0.5)
    many = fedflat.run(exp, federation=Federation([blobs(9)] * 5), model=network())
    one = fedflat.run(exp, federation=Federation([blobs(9)]), model=network())
    assert torch.allclose(many.server_weights, one.server_weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("weighting", "weights"), [("samples", SIZES), ("auto", SIZES), ("uniform", (1, 1, 1))])
@pytest.mark.parametrize("server_lr", [1.0, 0.25, 0.0])
def test_the_server_moves_by_the_weighted_mean_times_its_rate(
    weighting: str, weights: tuple[int, ...], server_lr: float
) -> None:
    exp, start = plain(local_epochs=2), flat(network())
    locals_ = local_models(exp, world(SIZES), network())
    run = fedflat.run(exp.replace(weighting=weighting, server_lr=server_lr), federation=world(SIZES), model=network())
    mean = sum(w * (y - start) for w, y in zip(weights, locals_, strict=True)) / sum(weights)
    assert torch.allclose(run.server_weights, start + server_lr * mean, rtol=0, atol=1e-14)


def test_only_participants_count() -> None:
    locals_ = local_models(plain(), world(SIZES), network())
    run = fedflat.run(plain(), federation=world(SIZES), model=network(), participants=lambda t: [2, 0])
    assert torch.allclose(run.server_weights, (5 * locals_[0] + 12 * locals_[2]) / 17, rtol=0, atol=1e-14)


def test_the_learning_rate_decays_from_the_second_round_on() -> None:
    run = fedflat.run(plain(rounds=6, lr=0.1, lr_decay=0.998), federation=world(), model=network())
    assert [row["lr"] for row in run.metrics] == [0.1 * 0.998**t for t in range(6)]


def test_a_decay_of_one_half_halves_the_second_step() -> None:
    """On a linear loss every step is −lr·g, so round 2 moves half as far as round 1."""
    model, data = nn.Linear(4, 1, bias=False).double(), [(blobs(6)[0], torch.zeros(6))]
    exp = plain(rounds=2, batch_size=0, lr=0.3, lr_decay=0.5)
    moves = []
    for rounds in (1, 2):
        run = fedflat.run(
            exp.replace(rounds=rounds), federation=Federation(data), model=model, loss=lambda out, y: out.mean()
        )
        moves.append(run.server_weights - flat(model))
    assert torch.allclose(moves[1], 1.5 * moves[0], rtol=0, atol=1e-15)


def test_evaluation_happens_when_asked_and_after_the_last_round() -> None:
    def evaluated(every: int) -> list[int]:
        run = fedflat.run(plain(rounds=5, evaluate_every=every), federation=world(), model=network())
        return [row["round"] for row in run.metrics if row["accuracy"] is not None]

    assert evaluated(1) == [1, 2, 3, 4, 5]
    assert evaluated(2) == [2, 4, 5]
    assert evaluated(0) == [5]


def test_nothing_is_evaluated_where_there_is_no_test_set() -> None:
    run = fedflat.run(plain(), federation=Federation([blobs(6)]), model=network())
    assert run.metrics[0]["accuracy"] is run.metrics[0]["loss"] is None


def test_communication_is_counted_in_numbers() -> None:
    run = fedflat.run(plain(dtype="float32"), federation=world(), model=restless())
    size = flat(restless()).numel() + 16
    assert (run.metrics[0]["floats_down"], run.metrics[0]["floats_up"]) == (size, size)


# ---- buffers ----


def test_running_statistics_are_averaged_by_samples_and_counters_copied_from_the_largest() -> None:
    sizes = (6, 14, 10)
    alone = [
        fedflat.run(plain(), federation=world(sizes), model=restless(), participants=lambda t, i=i: [i]).model
        for i in range(3)
    ]
    for weighting in ("samples", "uniform"):
        together = fedflat.run(plain(weighting=weighting), federation=world(sizes), model=restless()).model
        for name in ("running_mean", "running_var"):
            mean = sum(n * getattr(m[1], name) for n, m in zip(sizes, alone, strict=True)) / 30
            assert torch.allclose(getattr(together[1], name), mean, rtol=0, atol=1e-14)
        assert together[1].num_batches_tracked == math.ceil(14 / 4)


class Counting(nn.Module):
    """Counts its training passes in an integer buffer and has no other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.linear(x)


def test_integer_buffers_are_copied_from_the_largest_client_also_where_there_are_no_others() -> None:
    run = fedflat.run(plain(rounds=2), federation=world((6, 14, 10)), model=Counting())
    assert run.model.passes == 2 * math.ceil(14 / 4)


# ---- clients that are lost ----


def poisoned(clients: set[int], sizes: tuple[int, ...] = SIZES) -> Federation:
    pairs = [blobs(n, seed=i) for i, n in enumerate(sizes)]
    for client in clients:
        pairs[client][0][0, 0] = math.nan
    return Federation(pairs, test=blobs(9))


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_a_client_with_a_loss_that_is_no_number_is_left_out_and_reported(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fedflat"):
        exp = plain(rounds=2, backend=backend, workers=2, method="diary")
        run = fedflat.run(exp, federation=poisoned({1}), model=network())
    others = fedflat.run(exp, federation=world(SIZES), model=network(), participants=lambda t: [0, 2])
    assert torch.allclose(run.server_weights, others.server_weights, rtol=0, atol=1e-14)
    assert [(row["clients"], row["left_out"]) for row in run.metrics] == [(2, 1), (2, 1)]
    assert {row["client"] for row in run.clients} == {0, 2}
    assert run.client_state(1) == {}
    warnings = [record.getMessage() for record in caplog.records]
    assert [w.startswith(f"round {t}: client 1 is left out") for t, w in enumerate(warnings, 1)] == [True, True]


def test_weights_that_overflow_are_left_out() -> None:
    pairs = [blobs(6, seed=i) for i in range(3)]
    pairs[0] = pairs[0][0] * 1e30, pairs[0][1]
    exp = plain(dtype="float32", lr=1e10, local_epochs=3)
    run = fedflat.run(exp, federation=Federation(pairs), model=nn.Linear(4, 3), participants=lambda t: [0, 1])
    assert run.metrics[0]["left_out"] == 1
    assert torch.isfinite(run.server_weights).all()


class Meter(nn.Module):
    """Keeps the largest square it has met, which may overflow while the loss does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().square().max()))
        return self.linear(x.clamp(-1, 1))


def test_buffers_that_are_not_finite_are_left_out_too() -> None:
    pairs = [blobs(6, seed=i) for i in range(3)]
    pairs[1] = pairs[1][0] * 1e30, pairs[1][1]
    run = fedflat.run(plain(dtype="float32"), federation=Federation(pairs), model=Meter())
    assert run.metrics[0]["left_out"] == 1
    assert torch.isfinite(run.model.largest)


def test_messages_that_are_not_finite_are_left_out_too() -> None:
    class Shout(Diary):
        def end(self, local: Any) -> None:
            local.send(self, cry=torch.tensor([math.nan if local.client == 1 else 1.0]))

        def correct_gradient(self, local: Any) -> None: ...

        def end_round(self, server: Any) -> None:
            server.state(self)["cry"] = server.total(self)["cry"]

    fedflat.register(Shout)
    run = fedflat.run(plain(method="shout"), federation=world(), model=network())
    assert run.metrics[0]["left_out"] == 1
    assert run.server_state["shout"]["cry"].tolist() == [2.0]


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_a_lost_round_names_round_and_clients_and_leaves_the_last_good_checkpoint(tmp_path: Any, backend: str) -> None:
    exp = plain(rounds=4, backend=backend, workers=2, method="diary")
    turns = [[0, 2], [0], [1, 3], [2]]
    federation = poisoned({1, 3}, (5, 7, 12, 6))
    with pytest.raises(RoundLostError, match=r"round 3 .*client 1: .*client 3: "):
        fedflat.run(exp, federation=federation, model=network(), participants=turns.__getitem__, out=tmp_path / "a")
    good = fedflat.load_run(tmp_path / "a", model=network())
    reached = fedflat.run(exp.replace(rounds=2), federation=federation, model=network(), participants=turns.__getitem__)
    assert len(good.metrics) == 2
    assert_same_run(good, reached, 4)


class Deaf(Serial):
    """Clients on machines of their own, none of which is heard in the second round."""

    def run(self, broadcast: Broadcast, jobs: Iterable[Job]) -> Iterator[Update]:
        return iter(()) if broadcast.round == 2 else super().run(broadcast, jobs)


@pytest.mark.parametrize("method", ["fedavg", "swa(start=1, cycle=1)"])
def test_a_round_in_which_nobody_is_heard_changes_nothing_in_a_deployment(method: str) -> None:
    setup = make_setup(plain(method=method, rounds=4), federation=world(), model=network(), watch=["drift"])
    setup.deployed, models = True, list[Tensor]()
    loop = RoundLoop(setup, fresh_server(setup), Deaf(setup), ClientStore(), lambda t: [0, 1, 2])
    for _ in range(4):
        assert ("consistency" in loop.run_round()) == (loop.server.round != 2)
        models.append(loop.server.theta)
    assert torch.equal(models[1], models[0]) and not torch.equal(models[2], models[1])
    if setup.evaluator is not None:  # the second round would have begun the average, and is left out of it
        torch.testing.assert_close(setup.evaluator.evaluation_weights(loop.server), (models[2] + models[3]) / 2)


# ---- sums ----

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def tree_sum(terms: list[Tensor | None]) -> Tensor:
    total = TreeSum()
    for term in terms:
        total.add(None if term is None else term.clone())
    return total.result()


@given(NUMBERS)
@settings(deadline=None, max_examples=100)
def test_tree_sum_is_the_sum(numbers: list[float]) -> None:
    total = tree_sum([torch.tensor([x], dtype=torch.float64) for x in numbers])
    scale = math.fsum(map(abs, numbers))
    assert abs(total.item() - math.fsum(numbers)) <= 2**-53 * (math.log2(len(numbers)) + 1) * scale


@given(NUMBERS, st.data())
@settings(deadline=None, max_examples=100)
def test_an_aligned_block_can_be_added_elsewhere_with_the_same_bits(numbers: list[float], data: Any) -> None:
    terms: list[Tensor | None] = [torch.tensor([x]) for x in numbers]
    size = 2 ** data.draw(st.integers(0, 5))
    start = size * data.draw(st.integers(0, max(0, len(terms) // size - 1)))
    if start + size > len(terms):
        return
    block = [tree_sum(terms[start : start + size]), *[None] * (size - 1)]
    assert torch.equal(tree_sum(terms), tree_sum(terms[:start] + block + terms[start + size :]))


def test_a_missing_term_keeps_its_place() -> None:
    terms = [torch.tensor([x]) for x in (1.0, 2.0**-24, 2.0**-24, 1.0)]
    with_gap = tree_sum([terms[0], None, terms[1], terms[2]])
    assert with_gap == 1 + 2.0**-23
    for nothing in ([], [None, None, None]):
        with pytest.raises(ValueError, match="nothing to add"):
            tree_sum(nothing)


@given(st.integers(1, 70), st.data())
@settings(deadline=None, max_examples=60)
def test_rows_are_summed_along_the_same_tree(count: int, data: st.DataObject) -> None:
    """Bit for bit, signs of zeros included, with −0 in the place of a missing term."""
    missing = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
    rows[:, 0], rows[list(missing)] = -0.0, -0.0
    apart = tree_sum([None if i in missing else row for i, row in enumerate(rows)])
    assert sum_of_rows(rows).numpy().tobytes() == apart.numpy().tobytes()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None, max_examples=100)
def test_a_term_that_takes_several_positions_is_the_first_of_them(sizes: list[int]) -> None:
    """Blocks of any size at any place, as those of stacked clients."""
    terms = torch.randn(len(sizes), 3, generator=torch.Generator().manual_seed(len(sizes)))
    apart, at_once = list[Tensor | None](), TreeSum[Tensor]()
    for row, size in zip(terms, sizes, strict=True):
        apart += [row, *[None] * (size - 1)]
        at_once.add(row.clone(), size)
    assert torch.equal(at_once.result(), tree_sum(apart))


def test_tree_sum_holds_few_terms() -> None:
    total = TreeSum()
    for _ in range(1000):
        total.add(torch.ones(1))
        assert len(total._stack) <= 11
    assert total.result() == 1000


def test_without_noise_a_round_that_nobody_answers_is_void_and_no_error() -> None:
    """dp(noise=0) has nothing to hide, and scaffold's sums are of nobody."""
    exp = plain(method="dp(clip=1.0, noise=0.0)+scaffold", rounds=3)
    setup = make_setup(exp, federation=world(), model=network())
    setup.deployed = True
    loop = RoundLoop(setup, fresh_server(setup), Deaf(setup), ClientStore(), lambda t: [0, 1])
    models = [(loop.run_round(), loop.server.theta)[1] for _ in range(3)]
    assert torch.equal(models[0], models[1]) and not torch.equal(models[1], models[2])


def test_weights_that_the_server_step_makes_infinite_end_the_run_and_are_not_saved(tmp_path: Any) -> None:
    @fedflat.register
    @dataclass(frozen=True)
    class Explode(Part):
        """Its server step leaves the finite numbers in the last round."""

        def step(self, server: Server, delta: Tensor) -> None:
            server.theta = server.theta + (delta if server.round < server.rounds else delta / 0)

    exp = plain(method="explode", rounds=3)
    with pytest.raises(RoundLostError, match="not finite after its step"):
        fedflat.run(exp, federation=world(), model=network(), out=tmp_path / "run")
    left = tmp_path / "run" / "checkpoint.json"
    assert not left.exists() or fedflat.load_run(tmp_path / "run", network()).server_weights.isfinite().all()
