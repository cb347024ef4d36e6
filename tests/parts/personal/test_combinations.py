"""Personal methods together with the other parts: sums that run, and sums that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import network, restless
from torch import nn

from fedflat import InputError
from fedflat.core.method import Method
from parts.conformance.harness import assert_close, run_library
from parts.conformance.reference import descend, sam
from parts.personal.federations import accuracy, go, own_test
from parts.personal.simulation import ALL_THEN_SOME, HEAD, Sgd, flat, hard_world, passes

SUMS: list[tuple[str, dict[str, Any]]] = [
    ("ditto(lam=0.5)+asam(rho=0.2)", {}),
    ("ditto(lam=0.5)+scaffold", {"momentum": 0.0}),
    ("ditto(lam=0.5)+mixup+swa(start=0.3, cycle=1)", {}),
    ("fedrep(head_epochs=2)+man(zeta=0.1)", {}),
    ("fedrep(head_epochs=2)+feddyn(alpha=0.1)", {}),
    ("fedrep(head_epochs=2)+sam+scaffold", {"momentum": 0.0}),
    ("pfedme(lam=2.0, steps=2, lr=0.1)+const", {}),
    ("plgu_lf(rho=0.1, layers=1)+swa(start=0.3, cycle=1)", {}),
    ("fedper", {"batchnorm": "silobn"}),
    ("ditto(lam=0.5)", {"batchnorm": "local"}),
    ("local_only+sam", {}),
    ("apfl+fedavgm(beta=0.5)", {}),
    ("lg_fedavg+fedadam", {"server_lr": 0.01}),
    ("pfedhn(embedding=3, hidden=6)+man(zeta=0.1)", {}),
    ("plgu_grep+const", {}),
    ("fedbabu+asam(rho=0.2)", {}),
]


@pytest.mark.parametrize(("method", "options"), SUMS, ids=[f"{m} {o}" if o else m for m, o in SUMS])
def test_a_sum_runs_and_its_personal_models_are_those_scored(method: str, options: dict[str, Any]) -> None:
    run = go(method, restless(), **({"lr": 0.1} | options))
    assert run.server_weights.isfinite().all() and run.metrics[-1]["left_out"] == 0
    scored = [row for row in run.evaluations if row["personal"] is not None]
    assert {0, 1, 2, 4} <= {row["client"] for row in scored}
    for row in scored if "fedbabu" not in method else ():
        module = run.personal(row["client"])
        assert all(t.isfinite().all() for t in module.state_dict().values())
        assert row["personal"] == pytest.approx(accuracy(module, own_test(row["client"])), abs=1e-12)


SEVERAL = ("ditto(lam=0.5)", "plgu_lf(layers=1)", "apfl", "pfedme(lam=2.0, steps=2, lr=0.1)")


@pytest.mark.parametrize("method", SEVERAL)
def test_what_a_part_leaves_to_the_weight_decay_is_for_the_weights_that_are_sent(method: str) -> None:
    """FedDyn's pull is the same however it is written where nothing is clipped, and a client's own model feels none."""
    whole, split = (go(f"{method}+feddyn(alpha=0.2{how})", network(), clip=None) for how in ("", ", clip_split=True"))
    torch.testing.assert_close(split.server_weights, whole.server_weights)
    for i in (0, 1, 2, 4):
        torch.testing.assert_close(split.personal(i).state_dict(), whole.personal(i).state_dict())


@pytest.mark.parametrize(("method", "options"), [("fedper", {}), ("fedavg", {"batchnorm": "local"})])
@pytest.mark.parametrize("part", ["feddyn", "fedspeed"])
def test_a_weight_decay_for_all_weights_is_refused_where_some_stay(method: str, part: str, options: Any) -> None:
    with pytest.raises(InputError, match=f"{part}: clip_split is for models of which no weights stay"):
        go(f"{method}+{part}(clip_split=True)", restless(), **options)


@pytest.mark.parametrize(("method", "options"), [(m, o) for m, o in SUMS if "+" in m], ids=str)
def test_in_a_sum_the_other_parts_act(method: str, options: dict[str, Any]) -> None:
    both, alone = (go(m, restless(), **({"lr": 0.1} | options)) for m in (method, method.split("+")[0]))
    same = torch.equal(both.weights, alone.weights)
    if same:  # nothing is shared when everybody trains alone
        same = all(torch.equal(flat(both.personal(i)), flat(alone.personal(i))) for i in (0, 1, 2, 4))
    assert not same


def test_alone_with_sam_every_client_descends_with_sam() -> None:
    world = hard_world(participants=ALL_THEN_SOME).but(rule=sam(0.1))
    run = run_library(world, "local_only+sam(rho=0.1)")
    for i in range(4):
        w = world.start
        for t, chosen in enumerate(world.participants):
            if i in chosen:
                w, _ = descend(world, t, i, w)
        assert_close(flat(run.personal(i)), w)


def test_dittos_personal_model_climbs_with_sam_as_well() -> None:
    """The gradient rule is that of every trajectory; with no tie this is training alone with SAM."""
    world = hard_world(participants=ALL_THEN_SOME)
    left, right = run_library(world, "ditto(lam=0.0)+sam(rho=0.1)"), run_library(world, "local_only+sam(rho=0.1)")
    for i in range(4):
        assert_close(flat(left.personal(i)), flat(right.personal(i)), 1e-13)


def test_a_head_that_is_trained_alone_climbs_alone() -> None:
    """SAM looks for the worst point among those that training can reach; the frozen body is none of its directions."""
    world = hard_world(sizes=(7,), participants=((0,),), steps=0)
    run, w, sgd = run_library(world, "fedrep(head_epochs=2)+sam(rho=0.5)"), world.start, Sgd(world, 0, HEAD)
    for x, y in passes(world, 0, 0, epochs=2):
        g = world.net.gradient(w, x, y) * HEAD
        w = sgd.step(w, world.net.gradient(w + 0.5 * g / np.linalg.norm(g), x, y))
    assert_close(flat(run.personal(0)), w)


def test_a_personal_head_follows_its_own_gradient_under_a_proximal_term() -> None:
    """FedProx ties to what was received; a head is not received, so with μ huge only the body is held."""
    world = hard_world(participants=((0, 1, 2, 3),), momentum=0.0, nesterov=False, clip=None, lr=0.05)
    tied = run_library(world, "fedper+fedprox(mu=19.0)")
    start = torch.from_numpy(world.start)
    for i in range(4):
        moved = (flat(tied.personal(i)) - start)[20:]
        assert moved.norm() > 0.05


@pytest.mark.parametrize(
    "names",
    [
        ("pfedme", "sam"),
        ("fedrep", "ditto"),
        ("plgu_lf", "asam"),
        ("plgu_lf", "lwsam"),
        ("plgu_grep", "fedrep"),
        ("apfl", "mofedsam"),
        ("plgu_ghn", "fedspeed"),
        ("pfedhn", "plgu_ghn"),
        ("pfedhn", "fednova"),
        ("pfedhn", "feddyn"),
        ("fedbabu", "finetune"),
        ("fedrep", "fedbabu"),
    ],
)
def test_what_cannot_be_combined_is_refused_naming_both(names: tuple[str, str]) -> None:
    for text in ("+".join(names), "+".join(reversed(names))):
        with pytest.raises(InputError) as caught:
            Method.parse(text)
        assert all(repr(name) in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "text", ["ditto+asam", "fedper+scaffold", "plgu_lf(layers=1)+swa", "pfedhn+man", "apfl+fedprox"]
)
def test_the_order_of_writing_does_not_matter(text: str) -> None:
    world = hard_world(momentum=0.0, nesterov=False, lr=0.02)
    left, right = run_library(world, text), run_library(world, "+".join(reversed(text.split("+"))))
    assert torch.equal(left.server_weights, right.server_weights)
    for i in range(4):
        assert torch.equal(flat(left.personal(i)), flat(right.personal(i)))


def test_a_network_without_biases_is_split_as_any_other() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    run = go("fedrep(head_epochs=1)+const", module)
    assert run.metrics[-1]["floats_up"] == 24
