"""Ditto: a personal model beside the common one, tied to it by a proximal term."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from parts.conformance.harness import REGIMES, Trajectory, assert_close, run_library
from parts.conformance.reference import Array, World
from parts.personal.simulation import ALL_THEN_SOME, NET, Sgd, ditto, flat, hard_world, train, world_of


@pytest.mark.parametrize("regime", REGIMES)
def test_whole_runs_agree_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    run, expected = run_library(world, "ditto(lam=0.7)"), ditto(world, lam=0.7)
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)


@pytest.mark.parametrize("lam", [0.0, 0.1, 5.0])
def test_the_common_model_takes_the_same_way_as_without_ditto(lam: float) -> None:
    world, left, right = hard_world(), Trajectory(), Trajectory()
    run_library(world, f"ditto(lam={lam})", callbacks=[left])
    run_library(world, "fedavg", callbacks=[right])
    assert np.array_equal(left.points, right.points)


def test_with_scaffold_the_common_model_takes_scaffolds_way() -> None:
    world, left, right = hard_world(), Trajectory(), Trajectory()
    both = run_library(world, "ditto(lam=0.7)+scaffold", callbacks=[left])
    alone = run_library(world, "scaffold", callbacks=[right])
    assert np.array_equal(left.points, right.points)
    for i in range(4):
        assert torch.equal(both.client_state(i)["scaffold"]["c"], alone.client_state(i)["scaffold"]["c"])


def test_with_scaffold_the_personal_models_are_tied_to_scaffolds_models_and_not_corrected() -> None:
    """Control variates speak of the common trajectory; in the first round, where they are 0, nothing differs."""
    world, seen = hard_world(participants=((0, 1, 2, 3),) * 2), Trajectory()
    run = run_library(world, "ditto(lam=0.7)+scaffold", callbacks=[seen])
    first = ditto(world.but(participants=world.participants[:1]), lam=0.7)
    for i in range(4):
        v, received = first.own[i], seen.points[1]
        expected = _personal_round(world, 1, i, v, received, 0.7)
        assert_close(flat(run.personal(i)), expected)


def _personal_round(world: World, t: int, i: int, v: Array, w: Array, lam: float) -> Array:
    sgd = Sgd(world, t)
    for x, y in world.minibatches(t, i):
        v = sgd.step(v, NET.gradient(v, x, y) + lam * (v - w))
    return v


def test_without_a_tie_everybody_trains_alone() -> None:
    world = hard_world(participants=ALL_THEN_SOME)
    tied, alone = run_library(world, "ditto(lam=0.0)"), run_library(world, "local_only")
    for i in range(4):
        assert torch.equal(flat(tied.personal(i)), flat(alone.personal(i)))


def weighted_loss(output: Tensor, y: Tensor) -> Tensor:
    """Squared error of the samples, each times its last target."""
    return 0.5 * (((output - y) ** 2).sum(1) * (y[:, 0] != 0)).mean()


def test_without_a_loss_the_distance_shrinks_by_one_minus_lr_lambda_a_step() -> None:
    """Client 0 has no loss; client 1 moves the common model away from it, round by round."""
    lr, lam, steps = 0.1, 2.0, 3
    world, seen = (
        hard_world(sizes=(6, 6), participants=((0, 1),) * 3, lr=lr, momentum=0.0, nesterov=False),
        Trajectory(),
    )
    world = world.but(weight_decay=0.0, clip=None, lr_decay=1.0, steps=steps)
    world = world.but(data=[(world.data[0][0], 0.0 * world.data[0][1]), world.data[1]])
    run = run_library(world, f"ditto(lam={lam})", loss=weighted_loss, callbacks=[seen])
    v = world.start
    for w in seen.points[:3]:
        v = w + (1 - lr * lam) ** steps * (v - w)
    assert np.linalg.norm(v - seen.points[2]) > 1e-3
    assert_close(flat(run.personal(0)), v, 1e-12)


def test_a_client_that_is_not_drawn_keeps_its_model_bit_for_bit() -> None:
    world = hard_world(participants=((0, 1), (1, 2), (2,)))
    end, before = run_library(world, "ditto"), run_library(world.but(participants=((0, 1),)), "ditto")
    assert torch.equal(flat(end.personal(0)), flat(before.personal(0)))
    assert not torch.equal(flat(end.personal(1)), flat(before.personal(1)))


def test_it_sends_one_model_down_and_one_up() -> None:
    row = run_library(hard_world(), "ditto").metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)


def test_epochs_of_its_own_leave_the_common_model_alone() -> None:
    world = hard_world(participants=((0, 1, 2, 3),))
    longer, none = (run_library(world, f"ditto(epochs={n}, lam=0.0)") for n in (3, 0))
    for i in range(4):
        assert_close(flat(longer.personal(i)), train(world, 0, i, world.start, epochs=3))
        assert_close(flat(none.personal(i)), world.start)
    assert torch.equal(longer.server_weights, none.server_weights)
