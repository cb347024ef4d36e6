"""Differential privacy: what is sent and added, how much privacy that is, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_run, flat, network, plain, restless, world

import fedflat
from fedflat import InputError, Method
from fedflat.core.participation import participants
from fedflat.core.views import Update
from fedflat.parts import accountant
from fedflat.parts.accountant import ORDERS
from parts.conformance import reference as ref
from parts.conformance.harness import (
    PARTIAL,
    UNEQUAL,
    StopAfter,
    assert_close,
    experiment_of,
    federation_of,
    make_world,
    module_of,
    run_library,
    squared_error,
)
from parts.conformance.reference import Array, World

# ---- what is sent, and what is added ----


def clipped(v: Array, limit: float) -> Array:
    return v * min(1.0, limit / np.linalg.norm(v))


def averaged(world: World, clip: float, number: Callable[[Sequence[int]], float]) -> Array:
    """DP-FedAvg without its noise."""
    w = world.start
    for t, chosen in enumerate(world.participants):
        total = sum(clipped(ref.descend(world, t, i, w)[0] - w, clip) for i in chosen)
        w = w + world.server_lr * total / number(chosen)
    return w


def run_sampled(world: World, method: str, law: str, **changes: Any) -> fedflat.Run:
    """The library in this world, with participants drawn by a law of its own."""
    experiment = experiment_of(world, method, participation=law, **changes)
    return fedflat.run(experiment, federation=federation_of(world), model=module_of(world), loss=squared_error)


def test_updates_are_clipped_and_averaged_with_equal_weights() -> None:
    world = make_world(sizes=UNEQUAL, participants=PARTIAL, batch=3, server_lr=0.7)
    run = run_library(world, "dp(clip=0.5, noise=0.0)")
    assert_close(run.server_weights, averaged(world, 0.5, len))
    norms = [row["update_norm"] for row in run.clients]
    assert max(norms) == pytest.approx(0.5) and min(norms) < 0.49


@pytest.mark.parametrize(("law", "number"), [("bernoulli(0.4)", 4 * 0.4), ("uniform(3)", 3), ("all", 4)])
def test_the_sum_is_divided_by_a_number_that_does_not_depend_on_who_joined(law: str, number: float) -> None:
    drawn = [sorted(participants(law, 4, 0)(t)) for t in range(5)]
    world = make_world(sizes=UNEQUAL, participants=drawn)
    assert law != "bernoulli(0.4)" or len({len(chosen) for chosen in drawn}) > 1
    assert_close(
        run_sampled(world, "dp(clip=0.1, noise=0.0)", law).server_weights, averaged(world, 0.1, lambda s: number)
    )


def moves(method: str, rounds: int, law: str = "all", **changes: Any) -> list[Array]:
    """How the server's weights move from round to round where clients do not move: 24 000 coordinates of noise."""
    net = ref.Linear(1999, 12)
    world = make_world(net, sizes=(3,) * 5, participants=((0,),) * rounds, lr=0.0, steps=1)
    points: list[Array] = []

    class Note(fedflat.Callback):
        def start(self, run: fedflat.Run) -> None:
            points.append(run.server_weights.numpy())

        def round(self, run: fedflat.Run, metrics: Any) -> None:
            points.append(run.server_weights.numpy())

    experiment = experiment_of(world, method, participation=law, evaluate_clients=None, **changes)
    federation, module = federation_of(world), module_of(world)
    fedflat.run(experiment, federation=federation, model=module, loss=squared_error, callbacks=[Note()])
    return list(np.diff(points, axis=0))


@pytest.mark.parametrize(("law", "number"), [("all", 5), ("uniform(2)", 2), ("bernoulli(0.3)", 1.5)])
def test_the_noise_is_gaussian_of_the_size_that_clip_and_number_make(law: str, number: float) -> None:
    drawn = np.array(moves("dp(clip=2.0, noise=0.7)", 4, law)) / (0.7 * 2.0 / number)
    count = drawn.size
    assert abs(drawn.mean()) < 4 / math.sqrt(count)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / count)
    assert abs((np.abs(drawn) < 1).mean() - math.erf(math.sqrt(0.5))) < 4 * 0.47 / math.sqrt(count)


def test_noise_of_different_rounds_and_seeds_has_nothing_in_common() -> None:
    draws = [*moves("dp", 3), *moves("dp", 1, seed=1)]
    for left, right in combinations(draws, 2):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(len(left))
    assert np.array_equal(moves("dp", 1)[0], draws[0])


def test_no_data_of_one_client_move_the_sum_by_more_than_the_clip() -> None:
    """The sensitivity that the accountant counts on: C/m against a zero update, 2C/m against any other one."""
    base = make_world(sizes=UNEQUAL, participants=((0, 1, 2, 3),), steps=5)
    rng = np.random.default_rng(5)
    zero = base.but(data=[*base.data[:3], (np.zeros((7, 4)), np.zeros((7, 2)))], start=base.start * 0)
    ends = []
    for scale in (0.1, 1.0, 30.0):
        own = (rng.normal(size=(7, 4)), scale * rng.normal(size=(7, 2)))
        ends.append(run_library(zero.but(data=[*base.data[:3], own]), "dp(clip=0.05, noise=0.0)").server_weights)
    without = run_library(zero, "dp(clip=0.05, noise=0.0)").server_weights
    assert max((end - without).norm().item() for end in ends) == pytest.approx(0.05 / 4)
    assert max((left - right).norm().item() for left, right in combinations(ends, 2)) <= 2 * 0.05 / 4


def test_what_stays_with_the_clients_gets_no_noise_on_the_server() -> None:
    run = fedflat.run(plain(method="fedper+dp", rounds=2), federation=world(), model=network())
    start, end = flat(network()), run.server_weights
    head = torch.arange(len(end)) >= len(end) - 18
    assert torch.equal(start[head], end[head])
    assert (start[~head] != end[~head]).all()
    assert "epsilon" in run.metrics[0]


def test_the_norm_that_is_clipped_is_that_of_what_is_sent() -> None:
    experiment = plain(method="fedper+dp(clip=0.01, noise=0.0)", lr=0.5)
    run = fedflat.run(experiment, federation=world(), model=network())
    assert [row["update_norm"] for row in run.clients] == pytest.approx([0.01] * 3)


# ---- how much privacy ----


GRID, STEP = np.linspace(-60, 60, 2401, retstep=True)


def mixed(parts: Sequence[tuple[float, float]], noise: float) -> Array:
    """Logarithm of the density of Σ weight · N(mean, noise²) on the grid."""
    logs = [math.log(weight) - (GRID - mean) ** 2 / (2 * noise**2) for weight, mean in parts]
    return np.logaddexp.reduce(logs, axis=0) - math.log(noise * math.sqrt(2 * math.pi))


def divergence(p: Array, q: Array, order: float) -> float:
    """Rényi divergence of two densities, of which these are the logarithms."""
    return float(np.logaddexp.reduce(order * p + (1 - order) * q) + math.log(STEP)) / (order - 1)


def noisy_sum(sets: dict[tuple[int, ...], float], terms: Sequence[float], noise: float) -> Array:
    """The density of the sum, given the probability of every set of participants and what each would send."""
    return mixed([(weight, sum(terms[i] for i in chosen)) for chosen, weight in sets.items()], noise)


def joined(clients: int, rate: float, empty: bool) -> dict[tuple[int, ...], float]:
    sets = [s for size in range(clients + 1) for s in combinations(range(clients), size) if s or empty]
    weights = [rate ** len(s) * (1 - rate) ** (clients - len(s)) for s in sets]
    return {s: weight / sum(weights) for s, weight in zip(sets, weights, strict=True)}


def at(curve: Array, order: int) -> float:
    return float(curve[order == ORDERS][0])


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_without_sampling_the_divergence_is_order_over_twice_the_variance(noise: float) -> None:
    for curve in (accountant.gaussian(noise), accountant.poisson(noise, 1.0), accountant.fixed_size(noise, 1.0)):
        assert curve == pytest.approx(ORDERS / (2 * noise**2), rel=1e-12)


@pytest.mark.parametrize(("noise", "rate"), [(0.8, 0.01), (1.0, 0.2), (2.5, 0.6)])
def test_poisson_sampling_agrees_with_the_integral(noise: float, rate: float) -> None:
    with_one, without = mixed([(1 - rate, 0), (rate, 1)], noise), mixed([(1, 0)], noise)
    for order in (2, 3, 5, 8):
        exact = divergence(with_one, without, order)
        assert at(accountant.poisson(noise, rate), order) == pytest.approx(exact, rel=1e-9)
        assert divergence(without, with_one, order) <= exact
    assert at(accountant.poisson(noise, rate), 2) == pytest.approx(math.log1p(rate**2 * math.expm1(noise**-2)))


def sums(clients: int) -> list[tuple[float, ...]]:
    """What the others may send, at the limits and in between."""
    return list(product((-1.0, 0.0, 1.0), repeat=clients - 1))


@pytest.mark.parametrize(("clients", "rate", "noise"), [(1, 0.5, 1.5), (2, 0.3, 1.0), (3, 0.2, 2.0), (3, 0.6, 1.0)])
def test_the_bound_for_sampling_redrawn_when_nobody_joins_holds_for_every_federation(
    clients: int, rate: float, noise: float
) -> None:
    sets = joined(clients, rate, empty=False)
    worst = dict.fromkeys((2, 4), 0.0)
    for others, order in product(sums(clients), worst):
        with_one, without = (noisy_sum(sets, (own, *others), noise) for own in (1.0, 0.0))
        for pair in ((with_one, without), (without, with_one)):
            worst[order] = max(worst[order], divergence(*pair, order))
    for order, found in worst.items():
        bound = at(accountant.bernoulli(noise, rate, clients), order)
        assert found <= bound * (1 + 1e-9)
        assert clients > 1 or found == pytest.approx(bound, rel=1e-9)
        assert found > at(accountant.poisson(noise, rate), order), "as plain Poisson sampling it would promise too much"


@pytest.mark.parametrize(("clients", "size", "noise"), [(2, 1, 3.0), (3, 1, 4.0), (4, 2, 3.0), (4, 1, 6.0)])
def test_the_bound_for_sampling_of_a_fixed_size_holds_for_every_federation(
    clients: int, size: int, noise: float
) -> None:
    chosen = list(combinations(range(clients), size))
    sets = dict.fromkeys(chosen, 1 / len(chosen))
    for others, order in product(sums(clients), (2, 4)):
        with_one, without = (noisy_sum(sets, (own, *others), noise) for own in (1.0, 0.0))
        found = max(divergence(with_one, without, order), divergence(without, with_one, order))
        assert found <= at(accountant.fixed_size(noise, size / clients), order)


def test_many_clients_make_redrawing_negligible_and_sampling_always_helps() -> None:
    for noise, rate in ((1.0, 0.1), (2.0, 0.01)):
        plain_poisson = accountant.poisson(noise, rate)
        assert accountant.bernoulli(noise, rate, 100_000)[:60] == pytest.approx(plain_poisson[:60], rel=1e-9)
        assert (accountant.bernoulli(noise, rate, 50) >= plain_poisson).all()
        assert (accountant.fixed_size(noise, rate) <= accountant.gaussian(noise)).all()
        assert (plain_poisson <= accountant.fixed_size(noise, rate)).all()


def test_the_published_epsilon_of_dp_fedavg() -> None:
    """McMahan et al. (2018): of 763,430 users 5,000 a round, z = 1, 5,000 rounds: (4.634, 1e-9), converted as then."""
    curve = 5000 * accountant.poisson(1.0, 5000 / 763_430)
    whole = ORDERS % 1 == 0  # the paper has no others
    assert min((curve + math.log(1e9) / (ORDERS - 1))[whole]) == pytest.approx(4.634, abs=5e-4)
    assert accountant.epsilon(curve, 1e-9) < 4.634


@pytest.mark.parametrize(("noise", "rate"), [(0.6, 0.05), (1.0, 0.01), (1.3, 0.3), (4.0, 0.1)])
def test_opacus_computes_the_same(noise: float, rate: float) -> None:
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp", reason="needs the dp extra")
    whole = (ORDERS % 1 == 0) & (ORDERS <= 64)
    orders = [int(order) for order in ORDERS[whole]]
    theirs = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=300, orders=orders)
    mine = 300 * accountant.poisson(noise, rate)
    assert mine[whole] == pytest.approx(theirs, rel=1e-9)
    spent, _ = rdp.get_privacy_spent(orders=orders, rdp=theirs, delta=1e-5)
    assert 0.97 * spent < accountant.epsilon(mine, 1e-5) <= spent * (1 + 1e-9)  # fractional orders find a little less


def test_a_numerical_accountant_finds_a_little_less() -> None:
    """Opacus's PRV accountant computes the composition itself, of which ours is an upper bound."""
    prv = pytest.importorskip("opacus.accountants", reason="needs the dp extra").PRVAccountant()
    prv.history = [(1.0, 0.01, 500)]
    tight = prv.get_epsilon(delta=1e-5)
    assert tight <= accountant.epsilon(500 * accountant.poisson(1.0, 0.01), 1e-5) <= 1.4 * tight


# ---- in the records ----


@pytest.mark.parametrize(
    ("law", "curve"),
    [
        ("all", accountant.gaussian(1.5)),
        ("bernoulli(0.5)", accountant.bernoulli(1.5, 0.5, 3)),
        ("bernoulli(q=0.5)", accountant.bernoulli(1.5, 0.5, 3)),
        ("uniform(2)", accountant.fixed_size(1.5, 2 / 3)),
    ],
)
def test_every_round_reports_the_epsilon_of_all_rounds_so_far(law: str, curve: Array) -> None:
    experiment = plain(method="dp(noise=1.5, delta=1e-4)", participation=law, rounds=3)
    run = fedflat.run(experiment, federation=world(), model=network())
    expected = [accountant.epsilon(t * curve, 1e-4) for t in (1, 2, 3)]
    assert [row["epsilon"] for row in run.metrics] == pytest.approx(expected)


def test_participants_of_the_users_own_count_as_no_sampling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = run_library(make_world(participants=((0,), (1, 2))), "dp", participation="bernoulli(0.1)")
    assert run.metrics[-1]["epsilon"] == pytest.approx(accountant.epsilon(2 * accountant.gaussian(1.0), 1e-5))
    assert "dp" in caplog.text


def test_without_noise_nothing_is_promised() -> None:
    assert "epsilon" not in run_library(make_world(), "dp(noise=0.0)").metrics[-1]


def test_noise_and_epsilon_are_the_same_on_workers_and_after_a_stop(tmp_path: Path) -> None:
    def go(out: Path | None = None, **changes: Any) -> fedflat.Run:
        callbacks = changes.pop("callbacks", [])
        experiment = plain(method="dp+sam+fedavgm", participation="bernoulli(0.6)", rounds=4, **changes)
        return fedflat.run(experiment, federation=world(), model=network(), out=out, callbacks=callbacks)

    whole = go()
    go(tmp_path / "run", callbacks=[StopAfter(2)])
    assert_same_run(go(tmp_path / "run"), whole, 3)
    assert_same_run(go(backend="pool", workers=2), whole, 3)


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dp(clip=0.0)", "clip"),
        ("dp(clip=-1.0)", "clip"),
        ("dp(noise=-0.1)", "noise"),
        ("dp(clip=None)", "noise needs a clip"),
        ("dp(delta=0.0)", "delta"),
        ("dp(delta=1.0)", "delta"),
        ("dp+median", "both claim"),
        ("dp+norm_bound", "both claim"),
        ("dp+feddyn", "plain mean"),
    ],
)
def test_a_method_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Method.parse(text)


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_a_client_refuses_to_send_what_has_no_noise(backend: str) -> None:
    with pytest.raises(InputError, match=r"dp: scaffold sends"):
        fedflat.run(plain(method="dp+scaffold", backend=backend), federation=world(), model=network())
    fedflat.run(plain(method="dp(noise=0.0)+scaffold"), federation=world(), model=network())


def test_statistics_that_are_averaged_are_refused_and_those_that_stay_are_not() -> None:
    for policy in ("average", "recompute"):
        with pytest.raises(InputError, match=r"dp: the statistics of 1 are averaged without noise.*'local'"):
            fedflat.run(plain(method="dp", batchnorm=policy), federation=world(), model=restless())
    for policy in ("local", "silobn"):
        run = fedflat.run(plain(method="dp", batchnorm=policy), federation=world(), model=restless())
        assert run.weights.isfinite().all()


def test_a_number_of_local_steps_that_depends_on_who_joined_is_refused() -> None:
    with pytest.raises(InputError, match=r"mofedsam: its K.*local_steps"):
        fedflat.run(plain(method="dp+mofedsam"), federation=world(), model=network())
    run = fedflat.run(plain(method="dp+mofedsam", local_steps=2), federation=world(), model=network())
    assert run.weights.isfinite().all()


def test_weights_by_sample_counts_are_refused() -> None:
    with pytest.raises(InputError, match=r"dp.*weighting"):
        fedflat.run(plain(method="dp", weighting="samples"), federation=world(), model=network())


def test_an_average_of_all_clients_models_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fedflat.run(plain(method="dp", evaluated="all"), federation=world(), model=network())
    assert "does not cover" in caplog.text


# ---- orders, samples of a fixed size, numerical composition ----


@pytest.mark.parametrize(("noise", "rate"), [(0.6, 0.05), (1.0, 0.01), (1.3, 0.3), (4.0, 0.1)])
def test_the_integral_is_the_sum_at_whole_orders(noise: float, rate: float) -> None:
    for order in (2, 3, 7, 11):
        exact = accountant._log_moment(noise, rate, order)
        assert accountant._log_integral(noise, rate, order) == pytest.approx(exact, rel=1e-7, abs=1e-12)


def test_divergence_grows_with_the_order() -> None:
    """As every Rényi divergence does: so fractional and whole orders must fit together."""
    for found in (accountant.poisson(1.0, 0.05), accountant.bernoulli(1.0, 0.2, 50)):
        assert (np.diff(found) > 0).all()


def test_no_two_terms_tell_more_than_opposite_ones_of_the_largest_norm() -> None:
    """Terms of the client and of who is replaced, anywhere in the unit disc, at every γ ≥ 1 and in both directions."""
    side = np.linspace(-7, 7, 281)
    x, y = np.meshgrid(side, side)
    cell, luck = (side[1] - side[0]) ** 2, np.random.default_rng(0)

    def excess(rate: float, gamma: float, a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        own, none, other = (np.exp(-((x - c[0]) ** 2 + (y - c[1]) ** 2) / 2) / (2 * np.pi) for c in (b, (0, 0), a))
        here, there = (1 - rate) * other + rate * own, (1 - rate) * other + rate * none
        return tuple(float(np.maximum(p - gamma * q, 0).sum() * cell) for p, q in ((here, there), (there, here)))

    for _ in range(60):
        rate, gamma = luck.uniform(0.02, 0.9), 1 + luck.exponential(0.5)
        a, b = (r * np.array([np.cos(t), np.sin(t)]) for r, t in luck.uniform((0, 0), (1, 7), (2, 2)))
        forth, back = excess(rate, gamma, tuple(a), tuple(b))
        assert forth <= excess(rate, gamma, (-1, 0), (1, 0))[0] + 1e-9
        assert back <= excess(rate, gamma, (1, 0), (1, 0))[1] + 1e-9


def test_the_bound_of_a_fixed_size_is_the_integral_of_its_worst_profiles() -> None:
    """By γ itself, with thresholds found by bisection, instead of by x."""
    noise, rate = 1.3, 0.07
    log_gamma = np.linspace(0, 45, 20_001)
    low, high = np.full_like(log_gamma, -50), np.full_like(log_gamma, 200)

    def density(at: np.ndarray, centre: float) -> np.ndarray:
        parts = [np.log(w) - (at - c) ** 2 / (2 * noise**2) for w, c in ((1 - rate, -1.0), (rate, centre))]
        return np.asarray(np.logaddexp(*parts))

    for _ in range(80):
        middle = (low + high) / 2
        below = density(middle, 1.0) - density(middle, 0.0) < log_gamma
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    tails = {c: torch.special.log_ndtr(torch.from_numpy((c - low) / noise)).numpy() for c in (-1.0, 0.0, 1.0)}
    here, there = (np.logaddexp(np.log(1 - rate) + tails[-1.0], np.log(rate) + tails[c]) for c in (1.0, 0.0))
    profile = here + np.log(-np.expm1(np.minimum(there + log_gamma - here, -1e-300)))
    for order in (1.5, 4.0, 12.0):
        found = np.log(order * (order - 1)) + accountant._log_area((order - 1) * log_gamma + profile, log_gamma)
        assert found == pytest.approx(accountant._opposite(noise, rate, order), abs=1e-5)


def composed(noise: float, rate: float, rounds: int, delta: float) -> float:
    """A lower bound of the ε of the worst case: its privacy loss rounded down, composed with itself numerically."""
    step, reach = 2e-4, 40.0
    x = np.linspace(-1 - 12 * noise, 1 + 12 * noise, 200_001)
    cells = {c: np.diff(torch.special.ndtr(torch.from_numpy((x - c) / noise)).numpy()) for c in (-1.0, 1.0)}

    def density(centre: float) -> np.ndarray:
        parts = [np.log(w) - (x[:-1] - c) ** 2 / (2 * noise**2) for w, c in ((1 - rate, -1.0), (rate, centre))]
        return np.asarray(np.logaddexp(*parts))

    count = int(2 * reach / step)
    loss = np.floor((density(1.0) - density(0.0)) / step).astype(int) + count // 2
    once = np.bincount(loss, (1 - rate) * cells[-1.0] + rate * cells[1.0], minlength=count)[:count]
    often = np.fft.irfft(np.fft.rfft(np.roll(once, -(count // 2))) ** rounds, count)
    often, losses = np.maximum(np.roll(often, count // 2), 0), (np.arange(count) - count // 2) * step
    for eps in np.arange(0, 30, 0.05):
        over = losses > eps
        if float((often[over] * -np.expm1(eps - losses[over])).sum()) <= delta:
            return float(eps) - 0.05
    return float("inf")


def test_no_bound_for_a_fixed_size_can_be_that_of_poisson_sampling() -> None:
    """Of its worst case alone, composed without any bound, ε is more than four times that of Poisson sampling."""
    least, poisson = composed(1.0, 0.01, 100, 1e-5), accountant.epsilon(100 * accountant.poisson(1.0, 0.01), 1e-5)
    assert poisson < 1.22 and least > 5.0
    assert least < accountant.epsilon(100 * accountant.fixed_size(1.0, 0.01), 1e-5) < 6.25


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (1.0, 0.1), (2.0, 0.05)])
def test_a_fixed_size_costs_at_least_what_its_worst_case_does(noise: float, rate: float) -> None:
    """All others send the opposite: a mixture at −1 and 1 against one at −1 and 0, integrated numerically."""
    x = np.linspace(-60, 60, 200_001)

    def mixture(centre: float) -> np.ndarray:
        parts = [np.log(w) - (x - c) ** 2 / (2 * noise**2) for w, c in ((1 - rate, -1.0), (rate, centre))]
        return np.asarray(np.logaddexp(*parts) - np.log(noise * np.sqrt(2 * np.pi)))

    here, there = mixture(1.0), mixture(0.0)
    bound = dict(zip(accountant.ORDERS.tolist(), accountant.fixed_size(noise, rate), strict=True))
    for order in (1.5, 2.0, 3.0, 5.0):
        worst = accountant._log_area(order * here + (1 - order) * there, x) / (order - 1)
        assert worst <= bound[order] * (1 + 1e-6)
        assert bound[order] <= 1.25 * worst


def test_numerical_composition_is_tighter_where_it_is_installed() -> None:
    pytest.importorskip("opacus")
    own = accountant.epsilon(100 * accountant.poisson(1.0, 0.01), 1e-5)
    assert 0.6 < accountant.prv_epsilon(1.0, 0.01, 100, 1e-5) < 0.75 < own < 1.23


def test_the_metrics_take_the_accountant_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opacus")
    caplog.set_level(logging.INFO)
    found = {}
    for name in ("rdp", "prv"):
        e = plain(clients=40, rounds=2, participation="bernoulli(0.5)", model="logistic")
        e = e.replace(method=f"dp(noise=1.0, delta=1e-3, accountant='{name}')")
        found[name] = fedflat.run(e, federation=world((4,) * 40)).metrics[-1]["epsilon"]
    assert found["prv"] < found["rdp"]
    assert "epsilon is by the PRV accountant of opacus" in caplog.text


# ---- bounds that move ----


def test_the_bound_finds_the_quantile_of_the_norms() -> None:
    """Without noise, on updates of fixed norms 1, …, 9: C settles at the one of which a third are below."""
    part: Any = fedflat.Method.parse("dp(clip=0.1, noise=0.0, quantile=0.33)").parts[0]
    server = fedflat.Server(fedflat.FlatModel(torch.nn.Linear(1, 1)), plain(participation="all"), 9)
    server.asked = 9
    for _ in range(400):
        limit = part.limit(server)
        sent = [torch.tensor([min(float(k), limit), 0.0]) for k in range(1, 10)]
        part.combine(server, [Update(i, 1, 0.0, weight=1.0, delta=d, norm=float(d.norm())) for i, d in enumerate(sent)])
    assert 2.9 < part.limit(server) < 4.1


def test_noise_of_the_count_is_paid_for_by_that_of_the_update() -> None:
    part: Any = fedflat.Method.parse("dp(noise=1.0, quantile=0.5, count_noise=2.0)").parts[0]
    assert 1 / part._update_noise(10) ** 2 + 1 / 4.0**2 == pytest.approx(1.0)
    with pytest.raises(InputError, match="needs a count_noise above"):
        few: Any = fedflat.Method.parse("dp(noise=1.0, quantile=0.5, count_noise=0.5)").parts[0]
        few._update_noise(10)


def test_clients_are_told_the_bound_and_clip_to_it() -> None:
    e = plain(model="logistic", rounds=5, clients=3, method="dp(clip=1e-3, noise=0.0, quantile=0.5, clip_lr=1.0)")
    run = fedflat.run(e, federation=world())
    clips = [1e-3, *(row["clip"] for row in run.metrics)]
    for row in run.clients:
        assert row["update_norm"] <= clips[row["round"] - 1] * (1 + 1e-9)
    assert clips[-1] > 2e-3 and clips == sorted(clips)
