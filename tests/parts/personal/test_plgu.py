"""PLGU's parts: layer-wise SAM, layer freezing, and the generalised representation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from parts.conformance.harness import REGIMES, Trajectory, assert_close, run_library
from parts.conformance.reference import Array
from parts.personal.simulation import (
    ALL_THEN_SOME,
    BODY,
    HEAD,
    LAYERS,
    NET,
    PLAIN,
    Ascent,
    Sgd,
    flat,
    hard_world,
    lwsam,
    plgu_grep,
    plgu_lf,
    train,
    twin,
    world_of,
)

every_regime = pytest.mark.parametrize("regime", REGIMES)
TENSORS = (slice(0, 15), slice(15, 20), slice(20, 30), slice(30, 32))
BODY_LAYER = (LAYERS[0],)
BODY_TENSORS = TENSORS[:2]
KINDS: list[tuple[str, Ascent]] = [
    ("rho=0.2", Ascent()),
    ("rho=0.2, score='mean'", Ascent(norm="mean")),
    ("rho=0.2, score='none'", Ascent(norm="none")),
    ("rho=0.2, score='mean', score_dim_power=0.5", Ascent(norm="mean", kappa=0.5)),
    ("rho=0.2, granularity='module'", Ascent()),
    ("rho=0.2, granularity='tensor'", Ascent(layers=TENSORS)),
    ("rho=0.2, p=3.0", Ascent(p=3.0)),
    ("rho=0.2, p=1.5, score='mean'", Ascent(p=1.5, norm="mean")),
]
every_kind = pytest.mark.parametrize(("fields", "ascent"), KINDS, ids=[k for k, _ in KINDS])


# ---- the perturbation, with one trajectory ----


@every_regime
def test_lwsam_agrees_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    assert_close(run_library(world, "lwsam(rho=0.2)").server_weights, lwsam(world, Ascent()).w)


@every_kind
def test_lwsam_takes_its_scores_from_the_clients_last_local_model(fields: str, ascent: Ascent) -> None:
    world = hard_world()
    assert_close(run_library(world, f"lwsam({fields})").server_weights, lwsam(world, ascent).w)


def test_lwsam_without_a_radius_is_fedavg() -> None:
    world = hard_world()
    assert torch.equal(run_library(world, "lwsam(rho=0.0)").weights, run_library(world, "fedavg").weights)


def test_lwsam_with_equal_scores_of_mean_one_is_sam() -> None:
    """In everybody's first round no layer differs yet, so all scores are equal."""
    world = hard_world(participants=((0, 1, 2, 3),))
    left, right = run_library(world, "lwsam(rho=0.2, score='mean')"), run_library(world, "sam(rho=0.2)")
    assert_close(left.weights, right.weights)
    assert_close(
        run_library(world, "lwsam(rho=0.2)").weights, run_library(world, "sam(rho=0.1)").weights
    )  # scores that sum to one over two layers halve the radius


# ---- both trajectories: PLGU-LF ----


@every_regime
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_plgu_lf_agrees_with_the_formulas(regime: str, layers: int) -> None:
    world = world_of(regime)
    run, expected = run_library(world, f"plgu_lf(rho=0.2, layers={layers})"), plgu_lf(world, Ascent(), layers)
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)


@every_kind
def test_plgu_lf_agrees_with_the_formulas_for_every_kind_of_score(fields: str, ascent: Ascent) -> None:
    world = hard_world()
    run, expected = run_library(world, f"plgu_lf({fields}, layers=1)"), plgu_lf(world, ascent, 1)
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)


def test_plgu_lf_with_the_ascent_of_w_agrees_with_the_formulas() -> None:
    world = hard_world()
    run = run_library(world, "plgu_lf(rho=0.2, layers=1, ascent_grad='w')")
    assert_close(run.server_weights, plgu_lf(world, Ascent(), 1, by="w").w)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_plgu_lf_without_a_radius_trains_the_common_model_as_fedavg_does(layers: int) -> None:
    """Whatever θ⁰ is."""
    world, left, right = hard_world(), Trajectory(), Trajectory()
    run_library(world, f"plgu_lf(rho=0.0, layers={layers})", callbacks=[left])
    run_library(world, "fedavg", weighting="uniform", callbacks=[right])
    assert np.array_equal(left.points, right.points)


def test_plgu_lf_without_a_radius_and_from_one_start_has_one_trajectory() -> None:
    world = hard_world(sizes=(7,), participants=((0,),))
    run = run_library(world, "plgu_lf(rho=0.0, layers=0)")
    assert_close(flat(run.personal(0)), run.server_weights, 1e-14)


def test_plgu_lf_one_step_with_equal_scores_of_mean_one_is_a_step_of_sam() -> None:
    world = hard_world(participants=((0, 1, 2, 3),), steps=1)
    left = run_library(world, "plgu_lf(rho=0.2, score='mean', layers=1)")
    assert_close(left.weights, run_library(world, "sam(rho=0.2)", weighting="uniform").weights)


def test_plgu_lf_without_personal_layers_starts_from_the_model_received() -> None:
    """D = 0 ⇒ θ⁰ = wᵗ: the personal model is a fresh descent from the last model received."""
    world, seen = hard_world(), Trajectory()
    run = run_library(world, "plgu_lf(rho=0.2, layers=0)", callbacks=[seen])
    for i in range(4):
        last = max(t for t, chosen in enumerate(world.participants) if i in chosen)
        assert_close(flat(run.personal(i)), train(world, last, i, seen.points[last]))


def test_plgu_lf_with_all_layers_personal_trains_alone() -> None:
    """D = L ⇒ θ⁰ = θ_i."""
    world = hard_world(participants=ALL_THEN_SOME)
    run, alone = run_library(world, "plgu_lf(rho=0.2, layers=2)"), run_library(world, "local_only")
    for i in range(4):
        assert_close(flat(run.personal(i)), flat(alone.personal(i)), 1e-13)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_plgu_lf_frozen_layers_do_not_move(weight_decay: float) -> None:
    """At first all scores are equal, and of equal ones the first layer is the personal one: it stays bit for bit."""
    world = hard_world(participants=((0, 1, 2, 3),), weight_decay=weight_decay)
    run, start = run_library(world, "plgu_lf(rho=0.2, layers=1, freeze=True)"), torch.from_numpy(world.start)
    for i in range(4):
        own = flat(run.personal(i))
        assert torch.equal(own[LAYERS[0]], start[LAYERS[0]])
        assert not torch.equal(own[LAYERS[1]], start[LAYERS[1]])


def test_plgu_lf_keeps_the_personal_model_of_an_absent_client() -> None:
    world = hard_world(participants=((0, 1), (1, 2), (3,)))
    end = run_library(world, "plgu_lf(rho=0.2, layers=1)")
    before = run_library(world.but(participants=((0, 1),)), "plgu_lf(rho=0.2, layers=1)")
    assert torch.equal(flat(end.personal(0)), flat(before.personal(0)))


def test_plgu_lf_sends_one_model_down_and_one_up() -> None:
    row = run_library(hard_world(), "plgu_lf(layers=1)").metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)


# ---- PLGU-GRep ----

GREP: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("body_epochs=2", {"body_epochs": 2}),
    ("body_steps=1", {"body_steps": 1}),
    ("body_steps=3", {"body_steps": 3}),
    ("reuse_grad=True", {"reuse": True}),
    ("score_source='previous'", {"source": "previous"}),
]


@pytest.mark.parametrize(("fields", "options"), GREP, ids=[g for g, _ in GREP])
@pytest.mark.parametrize("regime", [PLAIN, list(REGIMES)[-1]])
def test_plgu_grep_agrees_with_the_formulas(regime: str, fields: str, options: dict[str, Any]) -> None:
    world = world_of(regime)
    text = f"plgu_grep(rho=0.2, granularity='tensor', {fields})".replace(", )", ")")
    run, expected = run_library(world, text), plgu_grep(world, Ascent(layers=BODY_TENSORS), **options)
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)
    row = run.metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (BODY.sum(), BODY.sum())


def test_plgu_grep_without_a_radius_and_with_one_minibatch_takes_two_plain_steps_on_it() -> None:
    """The same as FedRep's body phase with two steps on the whole data."""
    world = world_of("full batch, everyone", steps=0, momentum=0.9, weight_decay=0.05)
    left = run_library(world, "plgu_grep(rho=0.0, body_steps=1)")
    right = run_library(world.but(steps=2), "fedrep(head_epochs=0)")
    assert_close(left.server_weights, right.server_weights, 1e-13)


@pytest.mark.parametrize("budget", ["head_epochs=2, body_epochs=1", "head_epochs=None, body_epochs=3"])
def test_plgu_grep_without_radius_and_last_step_is_fedrep_of_the_same_budget(budget: str) -> None:
    world = hard_world()
    left = run_library(world, f"plgu_grep(rho=0.0, generalise=False, {budget})", weighting="uniform")
    right = run_library(world, f"fedrep({budget})", weighting="uniform")
    assert torch.equal(left.server_weights, right.server_weights)
    for i in range(4):
        assert torch.equal(flat(left.personal(i)), flat(right.personal(i)))


def test_plgu_greps_first_raw_score_is_the_length_of_the_step_over_the_size_of_the_layer() -> None:
    """s_l = lr‖g_l‖/d_l, so ε_l = ρ lr ‖g_l‖/d_l · g'_l/‖g'‖, with g' at the body after its first step."""
    rho, world = 5.0, world_of("full batch, everyone", sizes=(6,), participants=((0,),), steps=0)
    (x, y), phi = world.data[0], world.start
    g = NET.gradient(phi, x, y) * BODY
    stepped = phi - world.lr * g
    again = NET.gradient(stepped, x, y) * BODY
    epsilon = np.zeros_like(phi)
    for s in BODY_TENSORS:
        score = world.lr * np.linalg.norm(g[s]) / (s.stop - s.start)
        epsilon[s] = rho * score * again[s] / np.linalg.norm(again)
    expected = stepped - world.lr * NET.gradient(stepped + epsilon, x, y) * BODY
    run = run_library(world, f"plgu_grep(rho={rho}, score='none', granularity='tensor', body_steps=1)")
    assert_close(run.server_weights, expected, 1e-12)
    plain: Array = stepped - world.lr * again
    assert np.linalg.norm(expected - plain) > 1e-5  # the perturbation shows


def test_plgu_greps_head_is_trained_on_the_body_received_and_stays_in_the_body_phase() -> None:
    world = hard_world(participants=((0, 1, 2, 3),))
    run = run_library(world, "plgu_grep(rho=0.2)")
    for i in range(4):
        expected = train(world, 0, i, world.start, HEAD)
        assert_close(flat(run.personal(i)).numpy()[HEAD], expected[HEAD])


def test_plgu_grep_scores_the_body_only() -> None:
    """With one layer in the body its share is all: the perturbation is SAM's on the body."""
    world = world_of("full batch, everyone", sizes=(6,), participants=((0,),), steps=0)
    (x, y), sgd = world.data[0], Sgd(world, 0, BODY)
    stepped = sgd.step(world.start, NET.gradient(world.start, x, y))
    g = NET.gradient(stepped, x, y) * BODY
    expected = sgd.step(stepped, NET.gradient(stepped + 0.2 * g / np.linalg.norm(g), x, y))
    for score in ("sum", "mean"):
        run = run_library(world, f"plgu_grep(rho=0.2, score='{score}', body_steps=1)")
        assert_close(run.server_weights, expected)


def test_the_references_two_trajectories_differ() -> None:
    """Otherwise none of the comparisons above would tell θ from w."""
    world = world_of(PLAIN)
    theta, w = twin(world, 0, 0, world.start, world.start, np.ones(2), Ascent(rho=0.2))
    assert np.linalg.norm(theta - w) > 1e-3
