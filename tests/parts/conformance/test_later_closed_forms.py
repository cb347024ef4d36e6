"""The methods since the five papers follow their formulas: the library against NumPy in float64, round by round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedflat import Federation
from fedflat.core.flat import FlatModel
from fedflat.parts.personal.ifca import starts
from fedflat.runs.result import Run
from fedflat.runs.runner import run

from . import later_reference as later
from . import reference as ref
from .harness import REGIMES, assert_agrees, assert_close, experiment_of, make_world, module_of, run_library
from .reference import Linear, Mlp, Result, World

NET, MLP = Linear(4, 2), Mlp(3, 5, 2)
MINIBATCHES = "minibatches, unequal sizes, some take part, lr decays"
Reference = Callable[[World], Result]
every_regime = pytest.mark.parametrize("regime", REGIMES)

QUADRATIC: dict[str, Reference] = {
    "fedcm(alpha=0.4)": lambda w: later.fedcm(w, 0.4),
    "fedcm(alpha=0.4)+sam(rho=0.3)": lambda w: later.fedcm(w, 0.4, ref.sam(0.3)),
    "fedacg(lam=0.6, beta=0.3)": lambda w: later.fedacg(w, 0.6, 0.3),
    "fedwmsam(alpha=0.4, rho=0.2, rate=0.3)": lambda w: later.fedwmsam(w, 0.4, 0.2, 0.3),
    "fedsmoo(rho=0.2, alpha=0.2)": lambda w: later.fedsmoo(w, 0.2, 0.2),
    "fedsmoo(rho=0.2, alpha=0.2, server='paper')": lambda w: later.fedsmoo(w, 0.2, 0.2, "paper"),
    "fedgloss(rho=0.2, rho_l=0.3, beta=4.0)": lambda w: later.fedgloss(w, 0.2, 0.3, 4.0),
    "fedgloss(rho=0.2, rho_l=0.3, beta=4.0, server='code')": lambda w: later.fedgloss(w, 0.2, 0.3, 4.0, "code"),
    "fedgloss(rho=0.2, rho_l=0.3, beta=4.0, warmup=3, rho_0=0.1)": lambda w: later.fedgloss(
        w, 0.2, 0.3, 4.0, warmup=3, rho_0=0.1
    ),
    "fedlesam(rho=0.3)": lambda w: later.fedlesam(w, 0.3),
    "fedlesam(rho=0.3, direction='last')": lambda w: later.fedlesam(w, 0.3, "last"),
    "fedgf(rho=0.2, rho_g=0.4, threshold=1.05, window=2)": lambda w: later.fedgf(w, 0.2, 0.4, 1.05, 2),
    "fedsol(rho=0.3, temperature=2.0)": lambda w: later.fedsol(w, 0.3, 2.0, None),
    "fedsol(rho=0.3, adaptive=True)": lambda w: later.fedsol(
        w, 0.3, 3.0, [(slice(0, 8), (2, 4)), (slice(8, 10), (2,))]
    ),
    "fedswa(rho=0.2, alpha=1.3)": lambda w: later.fedswa(w, 0.2, 1.3),
    "fedmoswa(rho=0.2, alpha=1.3, gamma=0.4)": lambda w: later.fedmoswa(w, 0.2, 1.3, 0.4),
    "fedmoswa(rho=0.2, alpha=1.3, gamma=0.4, option=1)": lambda w: later.fedmoswa(w, 0.2, 1.3, 0.4, 1),
    "fedinit(beta=0.3)": lambda w: later.fedinit(w, 0.3),
    "fedinit(beta=0.3, variant='code')": lambda w: later.fedinit(w, 0.3, "code"),
    "fedinit(beta=0.3)+fedprox(mu=0.4)": lambda w: later.fedinit(w, 0.3, mu=0.4),
    "fedinit(beta=0.3, variant='code')+fedprox(mu=0.4)": lambda w: later.fedinit(w, 0.3, "code", 0.4),
    "fedexp(eps=0.0)": lambda w: later.fedexp(w, 0.0),
    "fedexp(eps=0.02)": lambda w: later.fedexp(w, 0.02),
    "fedexp(eps=0.02, variant='code')": lambda w: later.fedexp(w, 0.02, "code"),
    "qfedavg(q=2.0)": lambda w: later.qfedavg(w, 2.0),
    "qfedavg(q=0.5)": lambda w: later.qfedavg(w, 0.5),
}


def part_of(method: str) -> str:
    return method.split("(")[0]


@every_regime
@pytest.mark.parametrize("method", QUADRATIC)
def test_a_method_follows_its_formula_on_quadratics(method: str, regime: str) -> None:
    world = make_world(NET, **REGIMES[regime])
    assert_agrees(run_library(world, method), QUADRATIC[method](world), part_of(method))


NEURAL: dict[str, Reference] = {
    "feddecorr(beta=0.4)": lambda w: ref.fedavg(w.but(term=later.correlation_term(0.4))),
    "feddecorr(beta=0.4)+sam(rho=0.1)": lambda w: ref.fedavg(
        w.but(term=later.correlation_term(0.4), rule=ref.sam(0.1))
    ),
    "fedsmoo(rho=0.1, alpha=0.2)+man(zeta=0.7)": lambda w: later.fedsmoo(w.but(term=ref.man_term(0.7)), 0.1, 0.2),
    "fedsol(rho=0.2)": lambda w: later.fedsol(w, 0.2, 3.0, None),
    "fedlesam(rho=0.1)": lambda w: later.fedlesam(w, 0.1),
}


@every_regime
@pytest.mark.parametrize("method", NEURAL)
def test_a_method_follows_its_formula_on_a_network(method: str, regime: str) -> None:
    world = make_world(MLP, **REGIMES[regime])
    assert_agrees(run_library(world, method), NEURAL[method](world), part_of(method))


# ---- labels ----

CLASSES = 4
LABELS = Mlp(3, 5, CLASSES)


def labelled(regime: str) -> World:
    """Clients with labels; client 0 has no sample of class 3, client 1 none of classes 0 and 1."""
    world = make_world(LABELS, **REGIMES[regime])
    rng = np.random.default_rng(5)
    data = []
    for i, (x, _) in enumerate(world.data):
        present = {0: [0, 1, 2], 1: [2, 3]}.get(i, range(CLASSES))
        data.append((x, rng.choice(list(present), len(x))))
    return world.but(data=data)


def run_labelled(world: World, method: str) -> Run:
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in world.data]
    return run(
        experiment_of(world, method),
        federation=Federation(data, classes=CLASSES),
        model=module_of(world),
        participants=lambda t: world.participants[t],
        progress=False,
    )


LABELLED: dict[str, Reference] = {
    "fedntd(beta=2.0)": lambda w: later.fedntd(w, 2.0, 1.0),
    "fedntd(beta=0.7, tau=2.0)": lambda w: later.fedntd(w, 0.7, 2.0),
    "fedntd(beta=2.0)+sam(rho=0.1)": lambda w: later.fedntd(w, 2.0, 1.0, ref.sam(0.1)),
    "fedlc(tau=0.8)": lambda w: later.fedlc(w, 0.8, "margin", CLASSES),
    "fedlc(tau=0.8, form='log')": lambda w: later.fedlc(w, 0.8, "log", CLASSES),
    "fedlc(tau=0.8)+sam(rho=0.1)": lambda w: later.fedlc(w, 0.8, "margin", CLASSES, ref.sam(0.1)),
}


@every_regime
@pytest.mark.parametrize("method", LABELLED)
def test_a_method_follows_its_formula_on_labels(method: str, regime: str) -> None:
    world = labelled(regime)
    assert_close(run_labelled(world, method).server_weights, LABELLED[method](world).w)


# ---- several models ----


@every_regime
@pytest.mark.parametrize("k", [2, 3])
def test_ifca_trains_the_model_that_fits_each_client_best(k: int, regime: str) -> None:
    world = make_world(NET, **REGIMES[regime])
    first = starts(FlatModel(module_of(world), torch.float64), torch.from_numpy(world.start), k, world.seed)
    models, choices = later.ifca(world, first.numpy())
    found = run_library(world, f"ifca(k={k})")
    assert_close(found.server_state["ifca"]["models"], models)
    assert {i: int(found.client_state(i)["ifca"]["choice"]) for i in choices} == choices
    counts = [found.metrics[-1][f"ifca_{j}"] for j in range(k)]
    assert sum(counts) == len(world.participants[-1])


def test_the_models_of_ifca_start_at_different_points_that_the_seed_determines() -> None:
    flat = FlatModel(module_of(make_world(NET)), torch.float64)
    one, same, other = (starts(flat, flat.theta, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(one, same) and torch.equal(one[0], flat.theta) and torch.equal(other[0], flat.theta)
    assert not torch.equal(one[1], one[2]) and not torch.equal(one[1], other[1])


def test_fedexp_by_its_code_measures_learning_rates_by_that_of_the_first_round() -> None:
    """So ε is |S| ε in round 1, also where a warm-up begins below `lr`."""
    world = make_world(NET, participants=((0, 1, 2, 3),))
    rates = [
        run_library(world, method, lr_schedule="warmup(rounds=5)").metrics[0]["fedexp_rate"]
        for method in ("fedexp(eps=1e-4, variant='code')", "fedexp(eps=4e-4)")
    ]
    assert rates[0] == pytest.approx(rates[1]) and rates[0] > 1


# ---- what is recorded ----


def test_fedexp_records_its_rate_and_evaluates_the_mean_of_the_last_two_models() -> None:
    world = make_world(NET, **REGIMES[MINIBATCHES])
    found, expected = run_library(world, "fedexp(eps=0.0)"), later.fedexp(world, 0.0)
    *sent, rates = expected.sent
    assert [row["fedexp_rate"] for row in found.metrics] == pytest.approx(list(rates), rel=1e-9)
    assert max(rates) > 1
    assert_close(found.weights, (expected.w + sent[-1]) / 2)


def test_fedgf_records_the_mean_distance_and_the_share_of_rounds_above_the_threshold() -> None:
    world = make_world(NET, **REGIMES[MINIBATCHES])
    rows = run_library(world, "fedgf(threshold=1.5, window=2)").metrics
    above = [row["fedgf_distance"] > 1.5 for row in rows]
    assert 0 < sum(above) < len(above), "the threshold separates the rounds"
    assert [row["fedgf_c"] for row in rows] == [float(np.mean(above[max(0, t - 1) : t + 1])) for t in range(len(rows))]


def test_fedsmoo_records_the_norm_of_its_dual() -> None:
    world = make_world(NET)
    found = run_library(world, "fedsmoo(rho=0.2)")
    norms = [float(found.client_state(i)["fedsmoo"]["mu"].norm()) for i in range(4)]
    assert found.metrics[-1]["fedsmoo_mu"] == pytest.approx(np.mean(norms))


def test_fedlc_records_the_plain_loss() -> None:
    world = labelled("full batch, everyone")
    x, y = (torch.from_numpy(a) for a in world.data[0])
    with torch.no_grad():
        first = float(F.cross_entropy(module_of(world)(x), y))
    alone = world.but(data=world.data[:1], participants=((0,),), steps=1)
    assert run_labelled(alone, "fedlc(tau=3.0)").metrics[0]["train_loss"] == pytest.approx(first)
