"""APFL: an adaptive mixture of a personal and the common model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import restless

from parts.conformance.harness import REGIMES, Trajectory, assert_close, run_library
from parts.conformance.later_reference import from_logits
from parts.conformance.reference import Array, World
from parts.personal.federations import accuracy, go, own_test
from parts.personal.simulation import ALL_THEN_SOME, NET, PLAIN, Sgd, apfl, flat, hard_world, world_of


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_whole_runs_agree_with_the_formulas(regime: str, learn: bool) -> None:
    world = world_of(regime)
    run, expected = run_library(world, f"apfl(alpha=0.4, learn={learn})"), apfl(world, 0.4, learn)
    assert_close(run.server_weights, expected.w)
    for i, mixture in expected.own.items():
        assert_close(flat(run.personal(i)), mixture)
        assert float(run.client_state(i)["apfl"]["alpha"]) == pytest.approx(expected.extra["alpha"][i], abs=1e-12)


def test_the_reference_learns_a_mixture_that_differs_between_clients() -> None:
    """Otherwise the comparison above would not see the rule of α."""
    learnt = list(apfl(world_of(PLAIN), 0.4, True).extra["alpha"].values())
    assert np.ptp(learnt) > 1e-3
    assert all(a != 0.4 for a in learnt)


def test_the_common_model_takes_the_same_way_as_without() -> None:
    world, left, right = hard_world(), Trajectory(), Trajectory()
    run_library(world, "apfl", callbacks=[left])
    run_library(world, "fedavg", callbacks=[right])
    assert np.array_equal(left.points, right.points)


def test_alpha_one_for_good_is_training_alone() -> None:
    world = hard_world(participants=ALL_THEN_SOME)
    mixed, alone = run_library(world, "apfl(alpha=1.0, learn=False)"), run_library(world, "local_only")
    for i in range(4):
        assert_close(flat(mixed.personal(i)), flat(alone.personal(i)), 1e-13)


def test_alpha_zero_for_good_never_moves_the_personal_weights_and_evaluates_the_common_model() -> None:
    world = hard_world(participants=ALL_THEN_SOME, weight_decay=0.0)
    run = run_library(world, "apfl(alpha=0.0, learn=False)")
    for i in range(4):
        assert torch.equal(run.client_state(i)["apfl"]["theta"], torch.from_numpy(world.start))
        assert torch.equal(flat(run.personal(i)), run.server_weights)


def test_alpha_stays_between_zero_and_one() -> None:
    world, bounds = world_of("full batch, everyone"), set[float]()
    for start in (0.001, 0.999):
        run, expected = run_library(world, f"apfl(alpha={start})"), apfl(world, start, True).extra["alpha"]
        learnt = [float(run.client_state(i)["apfl"]["alpha"]) for i in range(4)]
        assert learnt == pytest.approx([expected[i] for i in range(4)], abs=1e-9)
        bounds |= set(learnt) & {0.0, 1.0}
    assert bounds == {0.0, 1.0}  # both are met


def test_known_bug_the_two_weights_of_the_mixture_sum_to_one() -> None:
    """One code mixes αv + αw. At first v = w, so whatever α is the mixture is w, and so is its gradient's place."""
    world = world_of("full batch, everyone", sizes=(6,), participants=((0,),), steps=1)
    (x, y), w, alpha = world.data[0], world.start, 0.25
    g = NET.gradient(w, x, y)
    run = run_library(world, f"apfl(alpha={alpha}, learn=False)")
    v, common = w - world.lr * alpha * g, w - world.lr * g
    assert_close(run.client_state(0)["apfl"]["theta"], v, 1e-13)
    assert_close(flat(run.personal(0)), alpha * v + (1 - alpha) * common, 1e-13)


def test_the_mixture_is_with_the_latest_common_model() -> None:
    world = hard_world(participants=((0, 1), (1,), (1,)))
    run = run_library(world, "apfl(alpha=0.4, learn=False)")
    v = run.client_state(0)["apfl"]["theta"]  # of a client that was away while the common model went on
    assert_close(flat(run.personal(0)), 0.4 * v + 0.6 * run.server_weights, 1e-14)


def test_alpha_is_learnt_once_a_round() -> None:
    """In round 1 v = w at the first step, so the slope is 0 and α cannot move, however many steps follow."""
    world = hard_world(participants=((0, 1, 2, 3),))
    run = run_library(world, "apfl(alpha=0.3)")
    assert all(float(run.client_state(i)["apfl"]["alpha"]) == 0.3 for i in range(4))


def test_it_sends_one_model_down_and_one_up() -> None:
    row = run_library(hard_world(), "apfl").metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)


# ---- outputs instead of weights ----


def mixed_outputs(world: World, alpha: float, learn: bool) -> tuple[Array, dict[int, Array], dict[int, float]]:
    """The common model, the clients' own weights and their α, where outputs are mixed."""
    w, own, alphas = world.start, dict[int, Array](), dict[int, float]()
    for t, chosen in enumerate(world.participants):
        ends = {}
        for i in chosen:
            v, a, u = own.get(i, w), alphas.get(i, alpha), w
            common, personal = Sgd(world, t), Sgd(world, t)
            for k, (x, y) in enumerate(world.minibatches(t, i)):
                z, other = NET.output(v, x), NET.output(u, x)
                r = (a * z + (1 - a) * other - y) / len(x)
                slope = (r * (z - other)).sum() + 0.02 * a
                v, u = personal.step(v, a * from_logits(NET, v, x, r)), common.step(u, NET.gradient(u, x, y))
                if learn and k == 0:
                    a = min(1.0, max(0.0, a - world.lr_in(t) * slope))
            own[i], alphas[i], ends[i] = v, a, u
        w = w + world.mean(chosen, {i: y - w for i, y in ends.items()}, uniform=False)
    return w, own, alphas


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_whole_runs_agree_with_the_formulas_of_mixed_outputs(regime: str, learn: bool) -> None:
    world = world_of(regime)
    run = run_library(world, f"apfl(alpha=0.4, learn={learn}, mix='logits')")
    w, own, alphas = mixed_outputs(world, 0.4, learn)
    assert_close(run.server_weights, w)
    x = world.data[0][0]
    for i, v in own.items():
        assert_close(run.client_state(i)["apfl"]["theta"], v)
        assert float(run.client_state(i)["apfl"]["alpha"]) == pytest.approx(alphas[i], abs=1e-12)
        expected = alphas[i] * NET.output(v, x) + (1 - alphas[i]) * NET.output(w, x)
        with torch.no_grad():
            assert_close(run.personal(i)(torch.from_numpy(x)), expected)


def test_a_mixture_of_outputs_is_scored_as_a_whole() -> None:
    """The accuracy in the records is that of the model that `personal` returns."""
    run = go("apfl(mix='logits')", restless(), dtype="float32")
    found = [row for row in run.evaluations if row["personal"] is not None]
    assert len(found) >= 4
    for row in found:
        expected = accuracy(run.personal(row["client"]), own_test(row["client"]))
        assert row["personal"] == pytest.approx(expected, abs=1e-12)
