"""Robust combinations follow their formulas, hold their bounds against any attacker, and do so on real data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEFENCES, blobs, flat, network, plain, world
from torch import nn

import fedflat
from fedflat import Experiment, Federation, FlatModel, InputError, Method, Server
from fedflat.core.views import Update
from fedflat.parts import robust
from parts.conformance import reference as ref
from parts.conformance.harness import (
    PARTIAL,
    UNEQUAL,
    StopAfter,
    assert_agrees,
    assert_close,
    assert_same_bits,
    make_world,
    run_library,
)
from parts.conformance.reference import Array, Result, World

# ---- the formulas, in NumPy ----


def bounded(v: Array, limit: float) -> Array:
    return v * min(1.0, limit / np.linalg.norm(v)) if v.any() else v


def trimmed(deltas: Array, cut: int) -> Array:
    return np.sort(deltas, axis=0)[cut : len(deltas) - cut].mean(0)


def krum_order(deltas: Array, f: int) -> Array:
    """Positions from the least to the largest sum of squared distances to the n − f − 2 nearest others."""
    scores = []
    for i, own in enumerate(deltas):
        others = sorted(np.sum((own - other) ** 2) for j, other in enumerate(deltas) if j != i)
        scores.append(sum(others[: len(deltas) - f - 2]))
    return np.argsort(scores)


def centred(deltas: Array, centre: Array, tau: float, steps: int) -> Array:
    for _ in range(steps):
        centre = centre + np.mean([bounded(delta - centre, tau) for delta in deltas], axis=0)
    return centre


def lower_median(deltas: Array) -> float:
    return float(np.sort(np.linalg.norm(deltas, axis=1))[(len(deltas) - 1) // 2])


Combine = Callable[[Array], Array]
FORMULAS: dict[str, Combine] = {
    "median": lambda d: np.median(d, axis=0),
    "trimmed_mean(beta=0.3)": lambda d: trimmed(d, int(0.3 * len(d))),
    "krum(attackers=2)": lambda d: d[krum_order(d, 2)[0]],
    "multikrum(attackers=2, keep=3)": lambda d: d[krum_order(d, 2)[:3]].mean(0),
    "multikrum(attackers=2)": lambda d: d[krum_order(d, 2)[:-2]].mean(0),
    "centred_clipping(tau=1.5)": lambda d: centred(d, np.zeros(d.shape[1]), 1.5, 1),
    "centred_clipping(tau=0.7, steps=4)": lambda d: centred(d, np.zeros(d.shape[1]), 0.7, 4),
    "norm_bound(limit=1.2)": lambda d: np.mean([bounded(row, 1.2) for row in d], axis=0),
    "norm_bound(quantile=0.5)": lambda d: np.mean([bounded(row, lower_median(d)) for row in d], axis=0),
    "centred_clipping(quantile=0.5)": lambda d: centred(d, np.zeros(d.shape[1]), lower_median(d), 1),
}
SHIFTED = [text for text in FORMULAS if "norm" not in text and "centred" not in text]
every_formula = pytest.mark.parametrize("text", FORMULAS)


def combined(text: str, deltas: Array | Sequence[Array], centre: Array | None = None) -> Array:
    """What the library makes of these updates."""
    deltas = np.asarray(deltas)
    part = Method.parse(text).parts[0]
    server = Server(FlatModel(nn.Linear(1, 1)), Experiment(), len(deltas))
    if centre is not None:
        server.state(part)["centre"] = torch.from_numpy(centre)
    rows = enumerate(torch.from_numpy(deltas))
    made = part.combine(server, [Update(i, 1, 0.0, weight=1 / len(deltas), delta=row) for i, row in rows])
    return made.numpy()


def updates(n: int = 9, d: int = 12, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return rng.normal(size=d) + rng.normal(size=(n, d)) * 0.6


@every_formula
@pytest.mark.parametrize("n", [7, 8, 13])
def test_it_follows_its_formula(text: str, n: int) -> None:
    deltas = updates(n, seed=n)
    assert_close(combined(text, deltas), FORMULAS[text](deltas), 1e-13)


@every_formula
def test_it_does_not_matter_who_sends_what(text: str) -> None:
    deltas = updates()
    assert_close(combined(text, deltas[np.random.default_rng(1).permutation(9)]), combined(text, deltas), 1e-13)


@pytest.mark.parametrize("text", SHIFTED)
def test_what_moves_and_stretches_all_updates_moves_and_stretches_the_result(text: str) -> None:
    deltas, shift = updates(), np.random.default_rng(2).normal(size=12)
    assert_close(combined(text, 3 * deltas + shift), 3 * combined(text, deltas) + shift, 1e-12)


@pytest.mark.parametrize("text", ["centred_clipping(tau=0.5)", "centred_clipping(tau=0.5, steps=3)"])
def test_what_moves_the_updates_and_the_centre_moves_the_result(text: str) -> None:
    deltas, centre = updates(), updates(seed=1)[0]
    shift = np.random.default_rng(2).normal(size=12)
    assert_close(combined(text, deltas + shift, centre + shift), combined(text, deltas, centre) + shift, 1e-13)


@every_formula
def test_equal_updates_are_the_result_where_no_bound_is_met(text: str) -> None:
    deltas = np.tile(updates()[0] * 0.1, (9, 1))
    assert_close(combined(text, deltas), deltas[0], 1e-14)


@pytest.mark.parametrize("text", ["centred_clipping(tau=1e6)", "norm_bound(limit=1e6)", "multikrum(attackers=0)"])
def test_bounds_that_nobody_meets_give_the_mean(text: str) -> None:
    assert_close(combined(text, updates()), updates().mean(0), 1e-13)


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {text: combined(text, updates(d=1000)) for text in FORMULAS}
    monkeypatch.setattr(robust, "BLOCK", 9 * 7)
    for text, result in whole.items():
        assert_close(combined(text, updates(d=1000)), result, 1e-14)


# ---- what attackers can do ----


def attacked(f: int, seed: int, least: int = -1) -> tuple[Array, Array]:
    """Seven honest updates, and these with f attackers' among them: of any size, each on its own or all alike."""
    rng = np.random.default_rng(seed)
    honest, size = updates(7, seed=seed), 10.0 ** rng.integers(least, 13)
    bad = size * rng.normal(size=(1 if seed % 2 else f, 12)) * np.ones((f, 1))
    return honest, rng.permutation(np.vstack([honest, bad]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("text", "f"), [("median", 6), ("trimmed_mean(beta=0.3)", 3), ("trimmed_mean(beta=0.47)", 6)])
def test_every_coordinate_stays_among_the_honest_ones(text: str, f: int, seed: int) -> None:
    honest, everybody = attacked(f, seed)
    made = combined(text, everybody)
    assert (made >= honest.min(0) - 1e-12).all() and (made <= honest.max(0) + 1e-12).all()


@pytest.mark.parametrize("seed", range(20))
def test_krum_takes_an_honest_update_and_multikrum_a_mean_of_honest_ones(seed: int) -> None:
    honest, everybody = attacked(2, seed, least=2)
    assert (combined("krum(attackers=2)", everybody) == honest).all(1).any()
    assert_close(combined("multikrum(attackers=2)", everybody), honest.mean(0), 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_attackers_move_a_clipped_mean_by_their_share_of_the_bound_and_no_more(seed: int) -> None:
    honest, everybody = attacked(3, seed)
    centre = updates(seed=50)[0]
    for text, start in (("norm_bound(limit=0.8)", np.zeros(12)), ("centred_clipping(tau=0.8)", centre)):
        harmless = np.vstack([honest, np.tile(start, (3, 1))])  # what would not pull at all
        moved = combined(text, everybody, centre) - combined(text, harmless, centre)
        assert np.linalg.norm(moved) <= 3 / 10 * 0.8 + 1e-12


def test_one_attacker_moves_the_mean_wherever_it_wants() -> None:
    honest, goal = updates(7), 1e6 * np.ones(12)
    attacker = 8 * goal - honest.sum(0)
    assert_close(combined("norm_bound(limit=None)", np.vstack([honest, attacker])), goal, 1e-12)


def test_a_large_attacker_does_not_blur_the_distances_of_the_others() -> None:
    deltas = updates(8) * 1e-3
    deltas[4] = 1e14
    assert_close(combined("multikrum(attackers=1, keep=3)", deltas), deltas[krum_order(deltas, 1)[:3]].mean(0), 1e-13)


# ---- in training ----


def trained(world: World, combine: Callable[[int, Array], Array]) -> Array:
    w = world.start
    for t, chosen in enumerate(world.participants):
        deltas = np.stack([ref.descend(world, t, i, w)[0] - w for i in chosen])
        w = w + world.server_lr * combine(t, deltas)
    return w


HARD = {"sizes": UNEQUAL, "participants": PARTIAL, "batch": 3, "momentum": 0.5, "server_lr": 0.7}


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("median", FORMULAS["median"]),
        ("trimmed_mean(beta=0.4)", lambda d: trimmed(d, int(0.4 * len(d)))),
        ("norm_bound(limit=0.1)", lambda d: np.mean([bounded(row, 0.1) for row in d], axis=0)),
    ],
)
def test_a_run_follows_the_formula_with_plain_means(text: str, formula: Combine) -> None:
    world = make_world(**HARD)
    assert_close(run_library(world, text).server_weights, trained(world, lambda t, d: formula(d)))


def test_centred_clipping_starts_from_where_the_last_round_went() -> None:
    world, centres = make_world(**HARD), [np.zeros(10)]

    def combine(t: int, deltas: Array) -> Array:
        centres.append(centred(deltas, centres[-1], 0.1, 2))
        return centres[-1]

    w = trained(world, combine)
    run = run_library(world, "centred_clipping(tau=0.1, steps=2)")
    assert_agrees(run, Result(w, server={"centre": centres[-1]}), "centred_clipping")


MIXED = [
    "median+sam(rho=0.1)+attack(kind='noise', clients=1)",
    "krum(attackers=1)+man(zeta=0.1)+fedprox(mu=0.1)+attack(clients=1, scale=5.0)",
    "multikrum(attackers=1)+scaffold+fedavgm",
    "centred_clipping(tau=0.1)+moon+fedadam+attack(kind='label_flip', clients=1)",
    "trimmed_mean(beta=0.2)+asam+swa(start=0.5, cycle=1)",
    "norm_bound(limit=0.1)+mofedsam+const",
]


@pytest.mark.parametrize("method", MIXED)
def test_defences_combine_with_local_and_server_parts_and_have_the_same_bits_everywhere(
    method: str, tmp_path: Path
) -> None:
    federation = Federation([blobs(n, seed=n) for n in (9, 8, 7, 9, 6)], test=blobs(9, seed=99))

    def go(out: Path | None = None, **changes: Any) -> fedflat.Run:
        callbacks = changes.pop("callbacks", [])
        experiment = plain(**({"method": method, "rounds": 4, "lr": 0.05} | changes))
        return fedflat.run(experiment, federation=federation, model=network(), out=out, callbacks=callbacks)

    whole = go()
    assert whole.weights.isfinite().all()
    go(tmp_path / "run", callbacks=[StopAfter(2)])
    assert_same_bits(go(tmp_path / "run"), whole)
    assert_same_bits(go(backend="pool", workers=2), whole)


# ---- attackers ----


def first_round(method: str, lr: float = 0.1) -> tuple[Array, list[float]]:
    """How the server's weights move with six clients, and the length of what each of them sends."""
    run = fedflat.run(plain(method=method, lr=lr, weighting="uniform"), federation=world((8,) * 6), model=network())
    norms = {row["client"]: row["update_norm"] for row in run.clients}
    return (run.server_weights - flat(network())).numpy(), [norms[i] for i in range(6)]


@pytest.mark.parametrize(("f", "who"), [(0, []), (1, [0]), (2, [0, 3]), (4, [0, 2, 3, 5]), (6, range(6))])
def test_attackers_are_spread_evenly_and_as_many_as_asked(f: int, who: Sequence[int]) -> None:
    _, honest = first_round("fedavg")
    _, sent = first_round(f"attack(clients={f}, scale=2.0)")
    assert sent == pytest.approx([norm * (2 if i in who else 1) for i, norm in enumerate(honest)])


def test_a_flipped_sign_turns_the_update_round() -> None:
    assert_close(first_round("attack(clients=6, scale=2.0)")[0], -2 * first_round("fedavg")[0])


def test_noise_has_the_scale_asked_for_and_every_attacker_its_own() -> None:
    """The mean of six independent draws is √6 times smaller than one of them."""
    mean, _ = first_round("attack(kind='noise', clients=6, scale=3.0)")
    assert abs(mean.std() * 6**0.5 - 3) < 5 * 3 / (2 * len(mean)) ** 0.5


def test_flipped_labels_are_those_counted_from_the_other_end() -> None:
    federation = world(sizes=(8,) * 3)
    flipped = Federation([(federation.samples(i).x, 2 - federation.samples(i).y) for i in range(3)])
    sent = fedflat.run(plain(method="attack(kind='label_flip', clients=3)"), federation=federation, model=network())
    asked = fedflat.run(plain(), federation=flipped, model=network())
    assert torch.equal(sent.server_weights, asked.server_weights)


def test_an_attacker_does_not_clip() -> None:
    _, norms = first_round("dp(clip=0.01, noise=0.0)+attack(scale=100.0)")
    assert norms == pytest.approx([1.0] + [0.01] * 5)


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("krum(attackers=-1)", "attackers"),
        ("multikrum(attackers=-1)", "attackers"),
        ("multikrum(keep=0)", "keep"),
        ("trimmed_mean(beta=0.5)", "beta"),
        ("trimmed_mean(beta=-0.1)", "beta"),
        ("centred_clipping(tau=0.0)", "tau"),
        ("centred_clipping(steps=0)", "steps"),
        ("norm_bound(limit=0.0)", "limit"),
        ("attack(clients=-1)", "clients"),
        ("attack(kind='sing_flip')", "sign_flip"),
        ("median+krum", "both claim"),
        ("feddyn+median", "plain mean"),
        ("feddyn+nnm", "'feddyn' and 'nnm'.*plain mean"),
        ("bucketing+fednova", "'fednova' and 'bucketing'.*own updates"),
        ("dp+nnm", "'dp' and 'nnm'"),
        ("ifca+bucketing", "'ifca' and 'bucketing'"),
        ("pfedhn+nnm", "'pfedhn' and 'nnm'"),
    ],
)
def test_a_method_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Method.parse(text)


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("krum(attackers=2)", {"participation": "uniform(6)"}, r"krum.*7 participants or more.*has 6"),
        ("multikrum(attackers=3)", {}, r"multikrum.*9 participants or more.*has 8"),
        ("krum(attackers=2)", {"participation": "bernoulli(0.5)"}, r"krum.*7 participants or more"),
        ("multikrum(attackers=1, keep=8)", {}, r"keep=8 of 8"),
        ("attack(clients=9)", {}, r"attack.*clients=9"),
    ],
)
def test_too_many_attackers_are_refused(method: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        fedflat.run(plain(method=method, **changes), federation=world(sizes=(4,) * 8), model=network())


def test_labels_that_are_numbers_cannot_be_flipped() -> None:
    with pytest.raises(InputError, match=r"label_flip.*numbers"):
        run_library(make_world(), "attack(kind='label_flip')")


def test_a_trimmed_mean_that_trims_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_library(make_world(), "trimmed_mean(beta=0.1)")
    assert "cuts none of 4" in caplog.text


# ---- on real data ----

TEN: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=32)",
    "clients": 10,
    "participation": "all",
    "local_epochs": 1,
    "batch_size": 32,
    "lr": 0.3,
    "backend": "serial",
    "evaluate_every": 0,
    "evaluate_clients": None,
}


@cache
def accuracy(method: str, partition: str = "iid", rounds: int = 8) -> float:
    """Of the embedded digits, dealt out to ten clients."""
    fields = TEN | {"method": method, "partition": partition, "rounds": rounds}
    run = fedflat.run(Experiment(**fields))
    return float(run.metrics[-1]["accuracy"])


ATTACKS = {
    "sign flip": "attack(clients=2, scale=10.0)",
    "noise": "attack(kind='noise', clients=2, scale=30.0)",
    "label flip": "attack(kind='label_flip', clients=2)",
    "boosted label flip": "attack(kind='label_flip', clients=2, scale=10.0)",
}


@pytest.mark.parametrize("attack", ["sign flip", "noise", "boosted label flip"])
def test_two_attackers_of_ten_bring_fedavg_down_to_chance(attack: str) -> None:
    assert accuracy("fedavg") > 0.9
    assert accuracy(f"fedavg+{ATTACKS[attack]}") < 0.25


def test_a_plain_label_flip_by_two_of_ten_hardly_hurts_fedavg() -> None:
    """Eight honest clients outvote it; only when it is boosted does it need a defence."""
    assert accuracy(f"fedavg+{ATTACKS['label flip']}") > accuracy("fedavg") - 0.05


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defence", DEFENCES)
def test_a_defence_stays_within_six_points_of_the_attack_free_run(defence: str, attack: str) -> None:
    assert accuracy(f"{defence}+{ATTACKS[attack]}") > accuracy("fedavg") - 0.06


def test_where_clients_differ_the_defences_cost_more_and_a_reversed_update_looks_like_one_more_opinion() -> None:
    """With labels by Dirichlet(0.3) no single update stands for all, and per coordinate the honest ones disagree, too.

    What looks at whole updates, and keeps most of them, still tells the attackers apart.
    """
    differing = ("dirichlet_equal(delta=0.3)", 20)
    free, flip = accuracy("fedavg", *differing), ATTACKS["sign flip"]
    assert free > 0.9
    assert accuracy("krum(attackers=2)", *differing) < free - 0.1
    assert accuracy(f"median+{flip}", *differing) < free - 0.05
    assert accuracy(f"multikrum(attackers=2)+{flip}", *differing) > free - 0.06


# ---- the geometric median ----


@pytest.mark.parametrize("seed", range(5))
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(seed: int) -> None:
    deltas = updates(11, seed=seed)
    found = combined("geometric_median(steps=200, nu=1e-9)", deltas)
    directions = (deltas - found) / np.linalg.norm(deltas - found, axis=1, keepdims=True)
    assert np.linalg.norm(directions.sum(0)) < 1e-4  # the gradient of the sum of distances


@pytest.mark.parametrize("size", [1e3, 1e9])
def test_the_geometric_median_stays_within_its_bound(size: float) -> None:
    """With a share a of attackers, it is at most 2(1 − a)/(1 − 2a) times as far away as the farthest honest one."""
    honest, bad = updates(8), np.full((3, 12), size)
    found, centre = combined("geometric_median(steps=100)", [*honest, *bad]), honest.mean(0)
    radius = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(found - centre) <= 2 * (8 / 11) / (1 - 6 / 11) * radius


# ---- what comes before the combination ----


def regrouped(text: str, deltas: Array) -> Array:
    part = Method.parse(text).filling("regroup")[0]
    server = Server(FlatModel(nn.Linear(1, 1)), Experiment(), len(deltas))
    received = [Update(i, 1, 0.0, weight=1.0, delta=row) for i, row in enumerate(torch.from_numpy(deltas))]
    return np.stack([update.delta.numpy() for update in part.regroup(server, received)])


def test_buckets_hold_every_update_once() -> None:
    deltas = updates(9)
    means = regrouped("bucketing(s=2)", deltas)
    assert means.shape == (5, 12)
    pairs = {(i, j): (deltas[i] + deltas[j]) / 2 for i in range(9) for j in range(i)}
    found = [pair for mean in means for pair, value in pairs.items() if np.allclose(mean, value)]
    alone = [i for mean in means for i in range(9) if np.allclose(mean, deltas[i])]
    assert sorted([i for pair in found for i in pair] + alone) == list(range(9))


def test_neighbours_are_averaged_as_in_the_formula() -> None:
    deltas, f = updates(9), 2
    for row, mixed in zip(deltas, regrouped("nnm(attackers=2)", deltas), strict=True):
        nearest = np.argsort(np.linalg.norm(deltas - row, axis=1))[: 9 - f]
        assert_close(mixed, deltas[nearest].mean(0), 1e-13)


def test_neighbours_need_a_majority() -> None:
    with pytest.raises(fedflat.errors.TooFewError, match="leaves no majority"):
        regrouped("nnm(attackers=5)", updates(9))


# ---- trust ----


def test_trust_follows_its_formula() -> None:
    deltas = updates(6)
    own = deltas.mean(0) + 0.3
    deltas[4] = -own
    part = Method.parse("fltrust").parts[0]
    server = Server(FlatModel(nn.Linear(1, 1)), Experiment(), 6)
    server.trusted = torch.from_numpy(own)
    made = part.combine(server, [Update(i, 1, 0.0, delta=row) for i, row in enumerate(torch.from_numpy(deltas))])
    norms = np.linalg.norm(deltas, axis=1)
    trust = np.maximum(0, deltas @ own / norms / np.linalg.norm(own))
    expected = (trust / norms * np.linalg.norm(own)) @ deltas / trust.sum()
    assert trust[4] == 0
    assert_close(made.numpy(), expected, 1e-10)


def test_the_server_trains_on_its_own_samples_as_a_client_would() -> None:
    """One client that holds the very samples of the server is trusted fully: its update is the result."""
    clean = blobs(12, seed=7)
    e = plain(model="logistic", clients=1, rounds=2, batch_size=0, method="fltrust")
    trusted = fedflat.run(e, federation=Federation([clean], trusted=clean))
    alone = fedflat.run(e.replace(method="fedavg"), federation=Federation([clean]))
    assert torch.allclose(trusted.server_weights, alone.server_weights, rtol=1e-12)


# ---- what is sent beside the update ----


def test_a_median_covers_what_scaffold_sends(caplog: pytest.LogCaptureFixture) -> None:
    """Attackers of the control variates alone: the mean of the variates follows them, their median does not."""
    e = plain(model="logistic", clients=5, rounds=3, batch_size=0, lr=0.1)
    held = Federation([blobs(9, seed=i) for i in range(5)])
    runs = {
        method: fedflat.run(e.replace(method=f"scaffold+{method}attack(kind='messages', scale=1e6)"), federation=held)
        for method in ("median+", "norm_bound(limit=100.0)+")
    }
    variates = {method: run.server_state["scaffold"]["c"].norm() for method, run in runs.items()}
    assert variates["median+"] < 10 < 1e4 < variates["norm_bound(limit=100.0)+"]
    assert "norm_bound looks at updates only: what scaffold sends is summed as it comes" in caplog.text


def test_the_median_of_the_variates_is_their_median() -> None:
    e = plain(model="logistic", clients=5, rounds=1, batch_size=0, method="scaffold+median")
    run = fedflat.run(e, federation=Federation([blobs(9, seed=i) for i in range(5)]))
    own = torch.stack([run.client_state(i)["scaffold"]["c"] for i in range(5)])
    assert torch.allclose(run.server_state["scaffold"]["c"], own.median(0).values, rtol=1e-12)


# ---- attacks ----


def attack(kind: str, deltas: Array, scale: float = 1.0, clients: int = 3) -> Array:
    return regrouped(f"attack(kind='{kind}', clients={clients}, scale={scale})", deltas)


def test_colluders_send_what_their_papers_say() -> None:
    deltas = updates(9)
    bad = [i for i in range(9) if i * 3 % 9 < 3]
    honest = np.delete(deltas, bad, axis=0)
    mean, spread = honest.mean(0), honest.std(0)
    for kind, scale, expected in (
        ("alie", 1.5, mean - 1.5 * spread),
        ("ipm", 0.5, -0.5 * mean),
        ("collude", 2.0, -2.0 * deltas[bad].mean(0)),
    ):
        sent = attack(kind, deltas, scale)
        assert_close(np.delete(sent, bad, axis=0), honest, 0)
        assert_close(sent[bad], np.tile(expected, (3, 1)), 1e-12)


def test_min_max_and_min_sum_go_as_far_as_unnoticed() -> None:
    deltas = updates(9)
    bad = [i for i in range(9) if i * 3 % 9 < 3]
    honest = np.delete(deltas, bad, axis=0)
    between = np.linalg.norm(honest[:, None] - honest[None], axis=2)
    far = np.linalg.norm(honest - attack("min_max", deltas)[bad[0]], axis=1).max()
    assert 0.999 * between.max() < far <= between.max() * (1 + 1e-9)
    total = np.sum((honest - attack("min_sum", deltas)[bad[0]]) ** 2)
    most = (between**2).sum(1).max()
    assert 0.999 * most < total <= most * (1 + 1e-9)


def test_a_claimed_size_moves_a_weighted_mean_only() -> None:
    e = plain(model="logistic", clients=5, rounds=2, batch_size=0)
    held = Federation([blobs(9, seed=i) for i in range(5)])
    weights = {
        method: fedflat.run(e.replace(method=method), federation=held).weights
        for method in (
            "attack(kind='size', scale=1e3)",
            "attack(kind='size')",
            "median+attack(kind='size', scale=1e3)",
            "median+attack(kind='size')",
        )
    }
    a, b, c, d = weights.values()
    assert not torch.allclose(a, b, rtol=1e-3) and torch.equal(c, d)


def test_a_backdoor_is_learnt_and_its_success_is_recorded() -> None:
    e = Experiment(
        data="digits",
        partition="iid",
        clients=5,
        participation="all",
        model="mlp(hidden=32)",
        rounds=4,
        local_epochs=2,
        batch_size=16,
        lr=0.2,
        evaluate_clients=None,
        backend="serial",
    )
    run = fedflat.run(e.replace(method="attack(kind='backdoor', clients=2, scale=2.0)"))
    clean = fedflat.run(e.replace(method="attack(kind='backdoor', clients=0)"))
    assert run.metrics[-1]["backdoor"] > 0.8 and clean.metrics[-1]["backdoor"] < 0.2
    assert run.metrics[-1]["accuracy"] > 0.7


@pytest.mark.parametrize(("policy", "warned"), [("average", True), ("silobn", False), ("local", False)])
def test_statistics_of_batchnorm_that_no_rule_covers_are_told_of(
    caplog: pytest.LogCaptureFixture, policy: str, warned: bool
) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    exp = Experiment(data="digits", clients=4, participation="all", rounds=1, local_steps=1, backend="serial")
    for method in ("median", "fedavg"):
        caplog.clear()
        fedflat.run(exp.replace(method=method, batchnorm=policy), model=module)
        assert ("median does not cover BatchNorm's statistics (2)" in caplog.text) == (warned and method == "median")
