"""Sums of parts: those the papers report, random legal ones, and those that are refused."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedflat import Experiment, Federation, InputError, load_federation
from fedflat.core.method import Method
from fedflat.runs.result import Run
from fedflat.runs.runner import run

from .harness import PARTIAL, UNEQUAL, StopAfter, assert_same_bits, make_world, run_library
from .parts import COMBINE, CONTROL, GRADIENT, LENGTH, MIXTURE, NEED_MEAN, PARTS, REPLACE_MEAN, STEP
from .reference import Linear, Mlp, World

SWA = "swa(start=0.34, cycle=1)"
PAPER_000 = [
    "+".join(sum_)
    for sum_ in product(["fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed"], ["man(zeta=0.15)"])
]
PAPER_004 = [
    "+".join(sum_)
    for sum_ in product(["fedavg", "fedprox", "moon(mu=0.01)", "scaffold", "feddyn", "fedsam"], ["const"])
]
PAPER_003 = [
    "+".join(filter(None, sum_))
    for sum_ in product(
        ["fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "adabest"],
        ["", "sam(rho=0.05)", "asam(rho=0.5, eta=0.2)"],
        ["", SWA],
    )
]
PAPER_003_SERVERS = [
    "+".join(filter(None, sum_))
    for sum_ in product(["fedavg", "fedadam", "fedadagrad"], ["sam(rho=0.05)", "asam(rho=0.5, eta=0.2)"], ["", SWA])
]


@cache
def digits() -> Federation:
    """Eight clients of the embedded handwritten digits, unequal in their labels."""
    return load_federation("digits", "dirichlet_equal(delta=0.3)", 8, 0)


def convolutional() -> nn.Module:
    """A bias-free convolutional network, as CONST wants it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 16, bias=False),
        nn.ReLU(),
        nn.Linear(16, 10, bias=False),
    )


def run_digits(method: str, model: nn.Module | None = None, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "method": method,
        "model": "mlp(hidden=16)",
        "participation": "uniform(3)",
        "rounds": 3,
        "local_steps": 4,
        "batch_size": 20,
        "lr": 0.05,
        "momentum": 0.9,
        "backend": "serial",
        "evaluate_every": 0,
    }
    return run(Experiment(**(fields | changes)), federation=digits(), model=model, progress=False)


def assert_sound(result: Run) -> None:
    """All weights are finite, and nobody was left out."""
    assert result.weights.isfinite().all()
    assert result.server_weights.isfinite().all()
    assert result.metrics[-1]["left_out"] == 0


@pytest.mark.parametrize("method", [*PAPER_000, *PAPER_003])
def test_a_combination_of_papers_000_and_003_runs_on_digits(method: str) -> None:
    assert_sound(run_digits(method))


@pytest.mark.parametrize("method", PAPER_004)
def test_a_combination_of_paper_004_runs_on_a_convolutional_network(method: str) -> None:
    assert_sound(run_digits(method, convolutional()))


@pytest.mark.parametrize("method", PAPER_003_SERVERS)
def test_a_server_optimiser_of_paper_003_runs_with_each_ascent(method: str) -> None:
    assert_sound(run_digits(method, server_lr=0.1))


@pytest.mark.parametrize("method", ["fedavg", "feddc+man", "scaffold+asam+swa(cycle=2)", "fedsam+const"])
def test_digits_are_learnt(method: str) -> None:
    """Without momentum, which SCAFFOLD's variates would count as gradient."""
    result = run_digits(method, convolutional(), rounds=10, participation="all", local_steps=8, lr=0.3, momentum=0.0)
    assert result.metrics[-1]["accuracy"] > 0.5


# ---- what cannot be combined ----


def one_text_a_part() -> list[str]:
    return list({part.name: part.text for part in reversed(PARTS)}.values())


def conflict(names: list[str]) -> bool:
    groups = (GRADIENT, STEP, COMBINE, MIXTURE, LENGTH, CONTROL)
    claimed_twice = any(sum(name in group for name in names) > 1 for group in groups)
    return claimed_twice or any(one in NEED_MEAN and other in REPLACE_MEAN for one, other in permutations(names, 2))


def test_two_parts_are_refused_exactly_when_they_claim_the_same_thing_or_one_spoils_the_others_mean() -> None:
    for left, right in combinations(one_text_a_part(), 2):
        names = [text.split("(")[0] for text in (left, right)]
        if not conflict(names):
            Method.parse(f"{left}+{right}")
            continue
        with pytest.raises(InputError) as caught:
            Method.parse(f"{left}+{right}")
        assert all(repr(name) in str(caught.value) for name in names), str(caught.value)
        assert "both claim" in str(caught.value) or "plain mean" in str(caught.value)


@pytest.mark.parametrize("text", ["sam+sam(rho=0.1)", "fedprox+fedavg+fedprox", "fedsam+sam", "fedman+man(zeta=1.0)"])
def test_a_part_given_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="twice"):
        Method.parse(text)


def test_fedavg_may_stand_in_any_sum_any_number_of_times() -> None:
    assert str(Method.parse("fedavg+fedsam+fedman")) == str(Method.parse("fedman+sam"))


# ---- any legal sum ----


LEAKY = {"scaffold", "fedwmsam", "fedgf", "fedmoswa"}  # send more than the update


@st.composite
def legal_sums(draw: st.DrawFn) -> list[str]:
    """Texts of parts of which no two claim the same slot."""
    chosen: list[str] = []
    for text in draw(st.lists(st.sampled_from([p.text for p in PARTS]), min_size=1, max_size=6, unique=True)):
        names = [other.split("(")[0] for other in (*chosen, text)]
        leaks = "dp" in names and not LEAKY.isdisjoint(names)  # refused, but only when a client is about to send
        if not conflict(names) and not leaks and len(set(names)) == len(names):
            chosen.append(text)
    return chosen


def convex_world(parts: list[str]) -> World:
    """Least squares; a small network where a part needs activations or features."""
    needs_network = any(text.startswith(("man", "moon", "feddecorr")) for text in parts)
    net = Mlp(3, 5, 2) if needs_network else Linear(4, 2)
    return make_world(
        net, sizes=UNEQUAL, participants=PARTIAL[:4], lr=0.02, momentum=0.5, clip=1.0, batch=4, weight_decay=0.01
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(parts=legal_sums(), last=st.integers(1, 3), shuffle=st.randoms(use_true_random=False))
def test_any_legal_sum_stays_finite_resumes_exactly_and_ignores_order_and_workers(
    parts: list[str], last: int, shuffle: Any
) -> None:
    world, text = convex_world(parts), "+".join(parts)
    whole = run_library(world, text)
    assert whole.weights.isfinite().all()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_library(world, text, out=out, callbacks=[StopAfter(last)])
        assert_same_bits(run_library(world, text, out=out), whole)
    shuffle.shuffle(parts)
    assert_same_bits(run_library(world, "+".join(parts)), whole)
    for workers in (1, 2):
        assert_same_bits(run_library(world, text, backend="pool", workers=workers), whole)


@pytest.mark.parametrize(
    "method",
    [
        "scaffold+asam(rho=0.2)+man(zeta=0.1)+const+swa(start=0.25, cycle=2)+fedprox(mu=0.1)+fedadam",
        "feddc(alpha=0.1)+moon+mofedsam+const",
        "adabest+fedprox(mu=0.1)+scaffold+sam+man(zeta=0.1)",
        "scaffold+fedprox(mu=0.1)+mofedsam(beta=0.5)+man(zeta=0.1)+moon",
    ],
)
def test_the_order_of_writing_never_matters(method: str) -> None:
    world = make_world(Mlp(3, 5, 2), sizes=UNEQUAL, participants=PARTIAL[:3], lr=0.02, momentum=0.5, clip=1.0)
    parts = method.split("+")
    runs = [run_library(world, "+".join(order)) for order in (parts, parts[::-1], parts[2:] + parts[:2])]
    for other in runs[1:]:
        assert_same_bits(other, runs[0])
