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
from conformance import reference as ref
from conformance.harness import (
    PARTIAL,
    UNEQUAL,
    StopAfter,
    assert_agrees,
    assert_close,
    assert_same_bits,
    make_world,
    run_library,
)
from conformance.reference import Array, Result, World
from helpers import DEFENCES, blobs, flat, network, plain, world
from torch import nn

import fedflat
from fedflat import Experiment, Federation, FlatModel, InputError, Method, Server
from fedflat.method import Update
from fedflat.parts import robust

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
    assert accuracy(f"median+{flip}", *differing) < free - 0.1
    assert accuracy(f"multikrum(attackers=2)+{flip}", *differing) > free - 0.06
