"""pFedMe: descent on Moreau envelopes, whose minimisers are the personal models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import plain
from torch import Tensor, nn

import fedflat
from fedflat import Federation
from parts.conformance.harness import assert_close, run_library, squared_error
from parts.conformance.reference import World
from parts.personal.simulation import NET, PLAIN, flat, pfedme, world_of

TEXT = "pfedme(lam=2.0, steps=3, lr=0.05, beta=0.7, mu=0.02)"
GIVEN: dict[str, Any] = {"lam": 2.0, "steps": 3, "lr": 0.05, "beta": 0.7, "mu": 0.02}
REGIMES = ("full batch, everyone", PLAIN)


@pytest.mark.parametrize("regime", REGIMES)
def test_whole_runs_agree_with_the_formulas(regime: str) -> None:
    world = world_of(regime)
    run, expected = run_library(world, TEXT), pfedme(world, **GIVEN)
    assert_close(run.server_weights, expected.w)
    for i, own in expected.own.items():
        assert_close(flat(run.personal(i)), own)


def test_the_experiments_weight_decay_is_that_of_the_inner_steps() -> None:
    """As in the authors' code, where the decay is part of the inner optimiser."""
    world = world_of(PLAIN, weight_decay=0.03)
    run, expected = run_library(world, TEXT), pfedme(world, **(GIVEN | {"mu": 0.05}))
    assert_close(run.server_weights, expected.w)


def test_the_hidden_weight_decay_of_the_authors_code_is_off_by_default() -> None:
    world = world_of(PLAIN)
    bare = run_library(world, "pfedme(lam=2.0, steps=3, lr=0.05)")
    assert_close(bare.server_weights, pfedme(world, **(GIVEN | {"mu": 0.0, "beta": 1.0})).w)


class Point(nn.Module):
    """Its output is its parameter, whatever the input: with squared errors F = ½‖θ − a‖²."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), -1)


def bowl(method: str, start: Tensor, a: Tensor, **changes: Any) -> fedflat.Run:
    data = Federation([(torch.zeros(2, 1, dtype=torch.float64), a.expand(2, -1).clone())], classes=1)
    e = plain(method=method, batch_size=0, local_steps=1, **changes)
    return fedflat.run(e, federation=data, model=Point(start), loss=squared_error, progress=False)


START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
TARGET = torch.tensor([0.2, 3.0, -1.0], dtype=torch.float64)


def test_on_a_bowl_the_personal_model_is_the_minimiser_of_the_envelope() -> None:
    """θ* = (a + λw)/(1 + λ), and the envelope's gradient λ(w − θ*) is ∇F(θ*) = θ* − a."""
    lam, lr = 3.0, 0.05
    run = bowl(f"pfedme(lam={lam}, steps=200, lr=0.1)", START, TARGET, lr=lr)
    minimiser = (TARGET + lam * START) / (1 + lam)
    assert_close(flat(run.personal(0)), minimiser, 1e-12)
    assert_close((START - run.server_weights) / lr, minimiser - TARGET, 1e-12)


def test_with_lr_lambda_one_the_common_model_takes_the_personal_ones_place() -> None:
    world = world_of(PLAIN, lr=0.25, lr_decay=1.0, sizes=(7,), participants=((0,),) * 3)
    run = run_library(world, "pfedme(lam=4.0, steps=3, lr=0.05)")
    assert_close(run.server_weights, flat(run.personal(0)), 1e-14)


def test_the_personal_model_goes_on_from_minibatch_to_minibatch() -> None:
    """One inner step a batch from the received w only would leave θ within one step of w."""
    lam, inner, lr = 1.0, 0.3, 1e-9
    run = bowl(f"pfedme(lam={lam}, steps=1, lr={inner})", START, TARGET, lr=lr)
    more = bowl(f"pfedme(lam={lam}, steps=2, lr={inner})", START, TARGET, lr=lr)
    contraction = 1 - inner * (1 + lam)
    minimiser = (TARGET + lam * START) / (1 + lam)
    assert_close(flat(run.personal(0)), minimiser + contraction * (START - minimiser), 1e-8)
    assert_close(flat(more.personal(0)), minimiser + contraction**2 * (START - minimiser), 1e-8)


def test_known_bug_the_personal_model_is_no_alias_of_the_clients_w() -> None:
    """The authors' code and PFLlib return live parameters, which w_i then overwrites."""
    world = world_of(PLAIN, sizes=(7,), participants=((0,),))
    run, expected = run_library(world, "pfedme(lam=2.0, steps=3, lr=0.05)"), pfedme(world, 2.0, 3, 0.05)
    personal, local = flat(run.personal(0)), run.server_weights  # one client: the server has exactly its w_i
    assert_close(personal, expected.own[0])
    assert_close(local, expected.w)
    assert np.linalg.norm(personal - local) > 0.01


def test_the_personal_model_of_an_absent_client_stays_as_it_was() -> None:
    world: World = world_of(PLAIN, participants=((0, 1), (1, 2), (3,)))
    end, before = (run_library(w, TEXT) for w in (world, world.but(participants=((0, 1),))))
    assert torch.equal(flat(end.personal(0)), flat(before.personal(0)))


def test_a_round_starts_at_the_received_model_not_at_the_old_personal_one() -> None:
    world = world_of(PLAIN, participants=((0, 1),) * 2)
    run = run_library(world, TEXT)
    sent = run_library(world.but(participants=world.participants[:1]), TEXT).server_weights.numpy()
    theta = local = sent
    for x, y in world.minibatches(1, 0):
        for _ in range(3):
            theta = theta - 0.05 * (NET.gradient(theta, x, y) + 2.0 * (theta - local) + 0.02 * theta)
        local = local - world.lr_in(1) * 2.0 * (local - theta)
    assert_close(flat(run.personal(0)), theta)


def test_beta_zero_leaves_the_server_where_it_is() -> None:
    world = world_of(PLAIN)
    run = run_library(world, "pfedme(lam=2.0, steps=3, lr=0.05, beta=0.0)")
    assert torch.equal(run.server_weights, torch.from_numpy(world.start))


def test_it_sends_one_model_down_and_one_up() -> None:
    row = run_library(world_of(PLAIN), TEXT).metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)
