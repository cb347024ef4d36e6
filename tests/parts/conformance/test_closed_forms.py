"""Every method follows its formula: the library against the NumPy reference, over several rounds in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from fedflat.parts.swa import SWA

from . import reference as ref
from .harness import REGIMES, assert_agrees, assert_close, make_world, run_library
from .reference import Linear, Mlp, Result, World

NET, MLP = Linear(4, 2), Mlp(3, 5, 2)
Reference = Callable[[World], Result]

QUADRATIC: dict[str, Reference] = {
    "fedavg": ref.fedavg,
    "fedprox(mu=0.3)": lambda w: ref.fedprox(w, 0.3),
    "fedavgm(beta=0.6)": lambda w: ref.fedavgm(w, 0.6),
    "fedadam(beta1=0.8, beta2=0.95, tau=0.1)": lambda w: ref.adaptive(w, "adam", 0.8, 0.95, 0.1),
    "fedadam(v_init=0.3)": lambda w: ref.adaptive(w, "adam", 0.9, 0.99, 0.1, 0.3),
    "fedadam(v_init=0.0, bias_correction=True)": lambda w: ref.adaptive(w, "adam", 0.9, 0.99, 0.1, 0.0, True),
    "fedadagrad": lambda w: ref.adaptive(w, "adagrad", 0.0, 0.0, 0.01),
    "fedadagrad(tau=0.2, beta1=0.7)": lambda w: ref.adaptive(w, "adagrad", 0.7, 0.0, 0.2),
    "fedadagrad(tau=0.2, v_init=0.0)": lambda w: ref.adaptive(w, "adagrad", 0.0, 0.0, 0.2, 0.0),
    "fedyogi(beta1=0.7, beta2=0.9, tau=0.1)": lambda w: ref.adaptive(w, "yogi", 0.7, 0.9, 0.1),
    "fedyogi(v_init=0.0)": lambda w: ref.adaptive(w, "yogi", 0.9, 0.99, 0.1, 0.0),
    "scaffold": ref.scaffold,
    "scaffold(option=1)": lambda w: ref.scaffold(w, option=1),
    "feddyn(alpha=0.2)": lambda w: ref.feddyn(w, 0.2),
    "feddyn(alpha=0.2, clip_split=True)": lambda w: ref.feddyn(w, 0.2, clip_split=True),
    "feddc(alpha=0.2)": lambda w: ref.feddc(w, 0.2),
    "adabest(beta=0.7, mu=0.3)": lambda w: ref.adabest(w, 0.7, 0.3),
    "sam(rho=0.3)": lambda w: ref.fedavg(w.but(rule=ref.sam(0.3))),
    "asam(rho=0.4, eta=0.2)": lambda w: ref.fedavg(w.but(rule=ref.asam(0.4, 0.2, w.net.is_weight))),
    "mofedsam(beta=0.4, rho=0.3)": lambda w: ref.mofedsam(w, 0.4, 0.3),
    "fedspeed(rho=0.3, alpha=0.2)": lambda w: ref.fedspeed(w, 0.3, 0.2),
    "fedspeed(rho=0.3, alpha=0.2, mix=0.4)": lambda w: ref.fedspeed(w, 0.3, 0.2, mix=0.4),
    "fedspeed(rho=0.3, alpha=0.2, clip_split=True)": lambda w: ref.fedspeed(w, 0.3, 0.2, clip_split=True),
    "fedspeed(rho=0.3, alpha=0.2, server='paper')": lambda w: ref.fedspeed(w, 0.3, 0.2, server="paper"),
    "fednova": ref.fednova,
    "fednova+fedprox(mu=0.3)": lambda w: ref.fednova(w, 0.3),
    "const": lambda w: ref.fedavg(w.but(constraint=ref.projected(w.net.channels))),
    "const(orthogonal=False)": lambda w: ref.fedavg(w.but(constraint=ref.projected(w.net.channels, True, False))),
    "const(center=False)": lambda w: ref.fedavg(w.but(constraint=ref.projected(w.net.channels, False, True))),
    "const(mode='sphere')": lambda w: ref.fedavg(w.but(constraint=ref.sphere(w.net.channels))),
}
NEURAL: dict[str, Reference] = {
    "fedavg": ref.fedavg,
    "sam(rho=0.1)": lambda w: ref.fedavg(w.but(rule=ref.sam(0.1))),
    "asam(rho=0.3, eta=0.1)": lambda w: ref.fedavg(w.but(rule=ref.asam(0.3, 0.1, w.net.is_weight))),
    "man(zeta=0.7)": lambda w: ref.fedavg(w.but(term=ref.man_term(0.7))),
    "moon(mu=2.0, temperature=0.4)": lambda w: ref.moon(w, 2.0, 0.4),
    "const": lambda w: ref.fedavg(w.but(constraint=ref.projected(w.net.channels))),
    # sums, in the order of a local step: loss terms inside both passes of the ascent, corrections outside it
    "man(zeta=0.7)+sam(rho=0.1)": lambda w: ref.fedavg(w.but(term=ref.man_term(0.7), rule=ref.sam(0.1))),
    "moon(mu=2.0, temperature=0.4)+sam(rho=0.1)": lambda w: ref.moon(w.but(rule=ref.sam(0.1)), 2.0, 0.4),
    "man(zeta=0.7)+feddc(alpha=0.2)": lambda w: ref.feddc(w.but(term=ref.man_term(0.7)), 0.2),
    "man(zeta=0.7)+fedspeed(rho=0.1, alpha=0.2)": lambda w: ref.fedspeed(w.but(term=ref.man_term(0.7)), 0.1, 0.2),
    "scaffold+asam(rho=0.3, eta=0.1)": lambda w: ref.scaffold(w.but(rule=ref.asam(0.3, 0.1, w.net.is_weight))),
    "feddyn(alpha=0.2)+sam(rho=0.1)": lambda w: ref.feddyn(w.but(rule=ref.sam(0.1)), 0.2),
    "feddc(alpha=0.2)+sam(rho=0.1)": lambda w: ref.feddc(w.but(rule=ref.sam(0.1)), 0.2),
    "adabest(beta=0.5, mu=0.1)+sam(rho=0.1)": lambda w: ref.adabest(w.but(rule=ref.sam(0.1)), 0.5, 0.1),
    "fedprox(mu=0.3)+sam(rho=0.1)": lambda w: ref.fedprox(w.but(rule=ref.sam(0.1)), 0.3),
    "scaffold+const": lambda w: ref.scaffold(w.but(constraint=ref.projected(w.net.channels))),
    "feddyn(alpha=0.2)+const": lambda w: ref.feddyn(w.but(constraint=ref.projected(w.net.channels)), 0.2),
    "const+fedavgm(beta=0.5)": lambda w: ref.fedavgm(w.but(constraint=ref.projected(w.net.channels)), 0.5),
    "sam(rho=0.1)+fedadam": lambda w: ref.adaptive(w.but(rule=ref.sam(0.1)), "adam", 0.9, 0.99, 0.1),
}
OWN_SERVER_STEP = ("feddyn", "feddc", "adabest", "fedspeed")


def part_of(method: str) -> str:
    """The stateful part that a method string begins or ends with."""
    names = [text.split("(")[0] for text in method.split("+")]
    bases = ("scaffold", "feddyn", "feddc", "adabest", "fedspeed", "fedavgm", "fedadam", "moon")
    return next((name for name in names if name in bases), names[0])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("method", QUADRATIC)
def test_a_method_follows_its_formula_on_quadratics(method: str, regime: str) -> None:
    world = make_world(NET, **REGIMES[regime])
    assert_agrees(run_library(world, method), QUADRATIC[method](world), part_of(method))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("method", NEURAL)
def test_a_method_follows_its_formula_on_a_network(method: str, regime: str) -> None:
    world = make_world(MLP, **REGIMES[regime])
    assert_agrees(run_library(world, method), NEURAL[method](world), part_of(method))


@pytest.mark.parametrize("method", [m for m in QUADRATIC if m.split("(")[0] not in OWN_SERVER_STEP])
def test_the_server_learning_rate_multiplies_the_server_step(method: str) -> None:
    world = make_world(NET, **REGIMES["minibatches, unequal sizes, some take part, lr decays"], server_lr=0.6)
    assert_agrees(run_library(world, method), QUADRATIC[method](world), part_of(method))


VARIANTS: dict[str, Reference] = {
    "scaffold(momentum_corrected=True)": lambda w: ref.scaffold(w, momentum_corrected=True),
    "asam(rho=0.4, eta=0.0, all_tensors=True)": lambda w: ref.fedavg(w.but(rule=ref.asam(0.4, 0.0, True))),
    "fedspeed(rho=0.1, alpha=0.2, normalised=False)": lambda w: ref.fedspeed(w, 0.1, 0.2, normalised=False),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("method", VARIANTS)
def test_a_named_alternative_follows_its_formula(method: str, regime: str) -> None:
    world = make_world(NET, **REGIMES[regime])
    assert_agrees(run_library(world, method), VARIANTS[method](world), part_of(method))


def test_adabests_mu_may_be_scaled_by_the_share_of_the_data_in_a_batch() -> None:
    world = make_world(NET, **REGIMES["minibatches, unequal sizes, some take part, lr decays"])
    expected = ref.adabest(world, 0.7, 0.3 * world.batch * world.epochs / world.sizes)
    assert_agrees(run_library(world, "adabest(beta=0.7, mu=0.3, mu_scaling='fedsim')"), expected, "adabest")


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=0.3)"])
def test_weighting_chooses_between_plain_and_sample_weighted_means(method: str, uniform: bool) -> None:
    world = make_world(NET, sizes=(4, 9, 5, 7))
    run = run_library(world, method, weighting="uniform" if uniform else "samples")
    assert_close(run.server_weights, ref.fedprox(world, 0.3 if "prox" in method else 0.0, uniform).w)


@pytest.mark.parametrize("collect", ["official", "paper", "cycle_end"])
@pytest.mark.parametrize(("start", "cycle"), [(0.5, 3), (0.25, 2), (0.5, 1), (0.3, 4)])
def test_swa_averages_the_models_it_collects_under_a_cyclical_rate(start: float, cycle: int, collect: str) -> None:
    world = make_world(NET, participants=((0, 1), (2, 3), (1, 3)) * 4, lr=0.1)
    run = run_library(world, f"swa(start={start}, cycle={cycle}, lr_min=0.01, collect={collect!r})")
    expected = ref.swa(world, start, cycle, 0.01, collect)
    assert_agrees(run, expected, "swa")
    assert_close(run.weights, expected.server["average"])


@pytest.mark.parametrize(
    ("collect", "models", "rate"), [("official", 249, 0.00901), ("paper", 250, 1e-4), ("cycle_end", 250, 1e-4)]
)
def test_swa_collects_as_many_models_at_the_rate_that_paper_003_and_its_code_say(
    collect: Literal["official", "paper", "cycle_end"], models: int, rate: float
) -> None:
    part = SWA(start=0.75, cycle=10, lr_min=1e-4, collect=collect)
    due = [t for t in range(10_000) if part.due(t, 10_000)]
    assert len(due) == models
    assert {round((1 - part.phase(t)) * 0.01 + part.phase(t) * 1e-4, 9) for t in due} == {rate}


def test_the_clip_of_the_last_regime_is_at_times_active_and_at_times_not() -> None:
    world = make_world(NET, **REGIMES["Nesterov, weight decay, clip, unequal sizes, some take part"])
    norms: list[float] = []

    def noted(f: ref.Gradient, w: ref.Array) -> ref.Array:
        norms.append(float((f(w) ** 2).sum() ** 0.5))
        return f(w)

    ref.fedavg(world.but(rule=noted))
    assert min(norms) < world.clip < max(norms)
