"""What every part must pass, whatever it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedflat.core.method import Method
from fedflat.parts import PARTS as SHIPPED
from fedflat.runs.result import Run, load_run

from .harness import (
    PARTIAL,
    REGIMES,
    UNEQUAL,
    StopAfter,
    assert_close,
    assert_same_bits,
    make_world,
    module_of,
    run_library,
)
from .parts import ALIASES, IMAGE_PARTS, PARTS, Listed
from .reference import Mlp, World

NET = Mlp(3, 5, 2)
HARD = REGIMES["Nesterov, weight decay, clip, unequal sizes, some take part"]
every_part = pytest.mark.parametrize("part", PARTS, ids=str)
THREE_WAYS = ({"backend": "serial"}, {"backend": "pool", "workers": 1}, {"backend": "pool", "workers": 2})


def hard_world() -> World:
    """Minibatches, unequal sizes, partial participation, Nesterov momentum, weight decay, clip, decaying rate."""
    return make_world(NET, **HARD)


def test_the_list_names_every_part_of_the_package() -> None:
    """The personal parts have a list of their own, in tests/personal."""
    shared = {part.name for part in SHIPPED if "personal" not in part.__module__}
    assert {part.name for part in (*PARTS, *IMAGE_PARTS)} | {"keep_momentum"} == shared


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("part", [p for p in PARTS if p.null], ids=lambda p: p.null)
def test_the_null_form_is_fedavg_bit_for_bit(part: Listed, regime: str) -> None:
    world = make_world(NET, **REGIMES[regime])
    null = run_library(world, part.null)
    plain = run_library(world, "fedavg", weighting="uniform" if part.uniform else "auto")
    assert torch.equal(null.weights, plain.weights)


@pytest.mark.parametrize("part", [p for p in PARTS if p.null], ids=lambda p: p.null)
def test_the_null_form_changes_no_bit_of_scaffold_in_single_precision(part: Listed) -> None:
    if part.name in ("adabest", "fedavg"):
        pytest.skip("owns the server step with its own mean" if part.name == "adabest" else "changes nothing")
    world = hard_world()
    left, right = (run_library(world, m, dtype="float32") for m in (f"scaffold+{part.null}", "scaffold"))
    assert torch.equal(left.weights, right.weights)


@every_part
def test_its_effect_shows(part: Listed) -> None:
    world = make_world(NET, **(HARD | {"steps": None, "epochs": 2}))
    run, plain = run_library(world, part.text), run_library(world, "fedavg")
    assert torch.allclose(run.weights, plain.weights, rtol=1e-9) == (part.text == "fedavg")


@every_part
def test_it_works_in_single_and_in_double_precision(part: Listed) -> None:
    world = hard_world()
    double, single = (run_library(world, part.text, dtype=d) for d in ("float64", "float32"))
    assert single.weights.dtype == torch.float32
    assert double.weights.dtype == torch.float64
    assert_close(single.weights, double.weights, 2e-3 if "fedada" in part.text or "yogi" in part.text else 1e-4)


@every_part
def test_it_keeps_what_it_says_and_only_for_those_who_took_part(part: Listed) -> None:
    world = make_world(NET, **(HARD | {"participants": PARTIAL[:1] * 5}))
    run = run_library(world, part.text)
    server = run.server_state.get(part.name, {})
    assert set(part.server) <= set(server)
    for i in range(4):
        kept = run.client_state(i).get(part.name, {})
        names = part.client if i in PARTIAL[0] else ()
        assert set(names) <= set(kept)
        assert sum(t.numel() for t in kept.values()) <= len(names) * NET.size


@every_part
def test_a_run_that_is_stopped_and_resumed_has_the_same_bits(part: Listed, tmp_path: Path) -> None:
    world = hard_world()
    whole = run_library(world, part.text)
    for last in (2, 3):
        stopped = run_library(world, part.text, out=tmp_path / "run", callbacks=[StopAfter(last)])
        assert len(stopped.metrics) == last
    assert_same_bits(run_library(world, part.text, out=tmp_path / "run"), whole)


@every_part
def test_its_state_survives_the_run_folder(part: Listed, tmp_path: Path) -> None:
    world = hard_world()
    run = run_library(world, part.text, out=tmp_path / "run")
    assert_same_bits(load_run(tmp_path / "run", model=module_of(world)), run)


@every_part
def test_renaming_the_clients_changes_nothing(part: Listed) -> None:
    world = make_world(NET, sizes=UNEQUAL, steps=3, momentum=0.9, weight_decay=0.01, lr=0.05)
    names = (2, 0, 3, 1)
    renamed = world.but(data=[world.data[i] for i in names])
    run, other = run_library(world, part.text), run_library(renamed, part.text)
    assert_close(other.weights, run.weights)
    for new, old in enumerate(names):
        for name, tensor in run.client_state(old).get(part.name, {}).items():
            assert_close(other.client_state(new)[part.name][name], tensor, 1e-8)


@every_part
def test_one_process_one_worker_and_two_workers_give_the_same_bits(part: Listed) -> None:
    runs: list[Run] = [run_library(hard_world(), part.text, **way) for way in THREE_WAYS]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@every_part
def test_it_runs_with_every_choice_of_evaluated_weights(part: Listed) -> None:
    plain = run_library(hard_world(), part.text, evaluated="server").weights
    no_mean = part.text.startswith(("qfedavg", "fedinit(beta=0.3, variant='code')"))  # of the local models is known
    choices = ("all",) if no_mean else ("selected", "all")
    for evaluated in choices:
        run = run_library(hard_world(), part.text, evaluated=evaluated)
        assert run.weights.isfinite().all()
        assert torch.equal(run.server_weights, plain)


@every_part
def test_its_text_describes_it(part: Listed) -> None:
    method = Method.parse(part.text)
    assert Method.parse(str(method)).parts == method.parts


@pytest.mark.parametrize("alias", ALIASES)
def test_a_famous_name_is_the_sum_it_stands_for(alias: str) -> None:
    world = hard_world()
    left, right = (run_library(world, method) for method in (alias, ALIASES[alias]))
    assert torch.equal(left.weights, right.weights)


def test_keep_momentum_is_one_long_run_of_sgd() -> None:
    """With one client, momentum that lasts makes four rounds of three steps the same as one round of twelve."""
    world = make_world(NET, sizes=(6,), participants=((0,),) * 4, steps=3, momentum=0.9)
    long = world.but(participants=((0,),), steps=12)
    assert_close(run_library(world, "keep_momentum").weights, run_library(long, "fedavg").weights, 1e-12)
