"""Methods that leave a part of the network with the client: FedRep, FedPer, LG-FedAvg, FedBABU, training alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedflat.runs.result import Run
from parts.conformance.harness import REGIMES, Trajectory, assert_close, run_library
from parts.personal.simulation import (
    ALL_THEN_SOME,
    BODY,
    EVERYTHING,
    HEAD,
    NET,
    Outcome,
    flat,
    hard_world,
    split,
    train,
    world_of,
)

every_regime = pytest.mark.parametrize("regime", REGIMES)
BODY_SIZE, HEAD_SIZE = int(BODY.sum()), int(HEAD.sum())


def assert_agrees(run: Run, expected: Outcome) -> None:
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)


def messages(run: Run) -> tuple[int, int]:
    return run.metrics[-1]["floats_down"], run.metrics[-1]["floats_up"]


def head(weights: Tensor) -> Tensor:
    return weights[torch.from_numpy(HEAD)]


def body(weights: Tensor) -> Tensor:
    return weights[torch.from_numpy(BODY)]


# ---- FedRep ----


@every_regime
def test_fedrep_agrees_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    run = run_library(world, "fedrep(head_epochs=2)")
    assert_agrees(run, split(world, HEAD, [(HEAD, 2), (BODY, None)]))
    assert messages(run) == (BODY_SIZE, BODY_SIZE)


def test_fedreps_phases_have_budgets_of_their_own() -> None:
    world = hard_world()
    run = run_library(world, "fedrep(head_epochs=None, body_epochs=3)")
    assert_agrees(run, split(world, HEAD, [(HEAD, None), (BODY, 3)]))


@pytest.mark.parametrize("more", ["", "+fedprox(mu=0.3)", "+scaffold", "+feddyn(alpha=0.2)", "+sam", "+const", "+man"])
def test_known_bug_fedreps_frozen_head_does_not_move_through_momentum_or_weight_decay(more: str) -> None:
    """Old codes stepped the frozen head with zero gradients, momentum and decay. Here no other part moves it either."""
    world = hard_world()
    run = run_library(world, f"fedrep(head_epochs=0){more}")
    start = torch.from_numpy(world.start)
    assert not torch.equal(body(run.server_weights), body(start))
    for i in range(4):
        assert torch.equal(head(flat(run.personal(i))), head(start))


def test_fedreps_body_stands_still_while_the_head_is_trained() -> None:
    world = hard_world(steps=0)
    run, start = run_library(world, "fedrep(head_epochs=2)"), torch.from_numpy(world.start)
    for i in range(4):
        assert torch.equal(body(flat(run.personal(i))), body(start))
        assert not torch.equal(head(flat(run.personal(i))), head(start))
    assert torch.equal(run.server_weights, start)


def test_fedreps_body_is_constant_for_a_single_client_that_trains_its_head_only() -> None:
    world = hard_world(sizes=(7,), participants=((0,),) * 3, steps=0)
    seen = Trajectory()
    run_library(world, "fedrep(head_epochs=3)", callbacks=[seen])
    assert all(np.array_equal(point, world.start) for point in seen.points)


# ---- FedPer ----


@every_regime
def test_fedper_agrees_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    run = run_library(world, "fedper(layers=1)")
    assert_agrees(run, split(world, HEAD))
    assert messages(run) == (BODY_SIZE, BODY_SIZE)


def test_fedper_without_personal_layers_is_fedavg() -> None:
    world, left, right = hard_world(), Trajectory(), Trajectory()
    run = run_library(world, "fedper(layers=0)", callbacks=[left])
    run_library(world, "fedavg", callbacks=[right])
    assert np.array_equal(left.points, right.points)
    assert messages(run) == (NET.size, NET.size)


def test_fedper_with_all_layers_personal_is_training_alone() -> None:
    world = hard_world()
    per, alone = run_library(world, "fedper(layers=2)"), run_library(world, "local_only")
    for i in range(4):
        assert torch.equal(flat(per.personal(i)), flat(alone.personal(i)))
    assert messages(per) == (0, 0)


# ---- LG-FedAvg ----


@every_regime
def test_lg_fedavg_agrees_with_the_formulas(regime: str) -> None:
    """The paper's split: the features are the client's, the head is averaged."""
    world = world_of(regime)
    run = run_library(world, "lg_fedavg")
    assert_agrees(run, split(world, BODY))
    assert messages(run) == (HEAD_SIZE, HEAD_SIZE)


# ---- FedBABU ----


@every_regime
def test_fedbabu_agrees_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    run = run_library(world, "fedbabu")
    assert_close(run.server_weights, split(world, HEAD, [(BODY, None)]).w)
    assert messages(run) == (BODY_SIZE, BODY_SIZE)


@pytest.mark.parametrize("more", ["", "+fedprox(mu=0.3)", "+scaffold", "+asam", "+const"])
def test_fedbabus_head_is_the_first_one_bit_for_bit(more: str) -> None:
    world, seen = hard_world(), Trajectory()
    run_library(world, f"fedbabu{more}", callbacks=[seen])
    for point in seen.points:
        assert np.array_equal(point[HEAD], world.start[HEAD])
    assert not np.array_equal(seen.points[-1][BODY], world.start[BODY])


# ---- alone ----


@every_regime
def test_local_only_is_every_clients_own_descent(regime: str) -> None:
    world = world_of(regime)
    run = run_library(world, "local_only")
    assert_agrees(run, split(world, EVERYTHING))
    assert torch.equal(run.server_weights, torch.from_numpy(world.start))
    assert messages(run) == (0, 0)


def test_local_only_does_not_notice_the_others() -> None:
    world = hard_world(participants=ALL_THEN_SOME)
    together = run_library(world, "local_only")
    fewer = run_library(world.but(participants=((0, 2), (0, 2), (2,), (0,))), "local_only")
    for i in (0, 2):
        assert torch.equal(flat(together.personal(i)), flat(fewer.personal(i)))


def test_local_only_is_one_long_descent() -> None:
    """Three rounds of two steps on the whole data are six steps, momentum aside."""
    world = world_of("full batch, everyone", participants=((0, 1, 2, 3),) * 3, steps=2, weight_decay=0.05)
    run = run_library(world, "local_only")
    for i in range(4):
        assert_close(flat(run.personal(i)), train(world.but(steps=6), 0, i, world.start))


# ---- who takes part first later ----


@pytest.mark.parametrize("method", ["fedrep(head_epochs=1)", "fedper"])
def test_a_client_that_joins_late_starts_with_the_first_head_on_the_latest_body(method: str) -> None:
    """Heads never travel, so what a newcomer receives is the common first head."""
    world = hard_world(participants=((0, 1), (0, 1), (3,)))
    phases = [(HEAD, 1), (BODY, None)] if "rep" in method else [(EVERYTHING, None)]
    run, expected = run_library(world, method), split(world, HEAD, phases)
    assert_close(flat(run.personal(3)), expected.own[3])
