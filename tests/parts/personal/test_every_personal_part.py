"""What every personalised method must pass: state that lasts, the same bits everywhere, models that are as scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_same_run, restless, same

import fedflat
from fedflat import InputError, load_run
from fedflat.core.method import Method
from fedflat.parts import PARTS
from fedflat.parts.personal import split
from parts.conformance.harness import StopAfter, assert_close, run_library
from parts.personal.federations import ADAPTED, METHODS, SIZES, WITHOUT, accuracy, go, own_test
from parts.personal.simulation import world_of

every_method = pytest.mark.parametrize("method", METHODS)
FLOAT = {"dtype": "float32"}


def own_models(run: fedflat.Run) -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    for i in range(len(SIZES)):
        try:
            found[i] = dict(run.personal(i).state_dict())
        except InputError:
            continue
    return found


def assert_same_everything(left: fedflat.Run, right: fedflat.Run) -> None:
    assert_same_run(left, right, len(SIZES))
    assert left.evaluations == right.evaluations
    assert same(own_models(left), own_models(right))


def test_every_personal_part_of_the_package_is_listed() -> None:
    folder = split.__name__.rpartition(".")[0]
    assert {part.name for part in PARTS if part.__module__.startswith(folder)} == {m.split("(")[0] for m in METHODS}


@every_method
def test_stopped_and_resumed_with_its_state_on_disk_or_on_workers_it_has_the_same_bits(
    method: str, tmp_path: Path
) -> None:
    """A network with running statistics and dropout, in single precision."""
    whole = go(method, restless(), **FLOAT)
    for last in (1, 2):
        go(method, restless(), out=tmp_path / "run", callbacks=[StopAfter(last)], **FLOAT)
    resumed = go(method, restless(), out=tmp_path / "run", **FLOAT)
    assert_same_everything(resumed, whole)
    assert_same_everything(load_run(tmp_path / "run", model=restless()), whole)
    on_disk = go(method, restless(), out=tmp_path / "disk", state_memory=0, **FLOAT)
    assert_same_everything(on_disk, whole)
    kept = [i for i in range(len(SIZES)) if whole.client_state(i)]
    files = list((tmp_path / "disk" / "clients").rglob("*.safetensors"))
    assert len(files) == len(kept)
    for workers in (1, 2) if method in (METHODS[0], METHODS[2], METHODS[-1]) else (2,):
        assert_same_everything(go(method, restless(), backend="pool", workers=workers, **FLOAT), whole)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in (*ADAPTED, *WITHOUT)])
def test_the_personal_model_is_the_one_that_was_scored(method: str) -> None:
    run = go(method, restless(), **FLOAT)
    rows = {row["client"]: row for row in run.evaluations}
    for i, row in rows.items():
        if row["personal"] is None:
            with pytest.raises(InputError, match=f"client {i}"):
                run.personal(i)
        else:
            assert row["personal"] == pytest.approx(accuracy(run.personal(i), own_test(i)), abs=1e-12)
    assert all(rows[i]["personal"] is not None for i in (0, 1, 2, 4))  # who took part has one
    # Who never did gets one from a hypernetwork only, and from one that makes the head as well.
    generated = method.startswith(("pfedhn", "plgu_ghn")) and "local_head" not in method
    assert (rows.get(3, {}).get("personal") is not None) == generated


@pytest.mark.parametrize("method", ADAPTED)
def test_a_model_that_is_only_fitted_for_evaluation_is_not_passed_off_as_kept(method: str) -> None:
    """`personal` gives what `evaluations` scored, or says that there is none."""
    run = go(method, restless(), **FLOAT)
    for row in run.evaluations:
        assert row["personal"] is not None
        try:
            module = run.personal(row["client"])
        except InputError:
            continue
        assert row["personal"] == pytest.approx(accuracy(module, own_test(row["client"])), abs=1e-12)


@pytest.mark.parametrize("method", WITHOUT)
def test_a_method_without_personal_models_scores_the_common_one_only(method: str) -> None:
    run = go(method, restless(), **FLOAT)
    assert all(row["personal"] is None and row["common"] is not None for row in run.evaluations)


@every_method
def test_a_client_that_does_not_take_part_keeps_its_state_bit_for_bit(method: str) -> None:
    """Client 0 is drawn in the first round only."""
    end, first = go(method, restless(), **FLOAT), go(method, restless(), rounds=1, **FLOAT)
    assert same(end.client_state(0), first.client_state(0))
    assert end.client_state(3) == {}


@every_method
def test_evaluating_the_clients_changes_nothing_of_the_training(method: str) -> None:
    if method == "finetune":
        pytest.skip("has nothing to do without the evaluation")
    often, never = (go(method, restless(), evaluate_clients=every, **FLOAT) for every in (1, None))
    assert torch.equal(often.server_weights, never.server_weights)
    assert all(same(often.client_state(i), never.client_state(i)) for i in range(len(SIZES)))
    assert never.evaluations == [] and {row["round"] for row in often.evaluations} == {1, 2, 3}


@every_method
def test_the_users_module_is_not_changed(method: str) -> None:
    module = restless()
    run = go(method, module, rounds=1, **FLOAT)
    assert same(dict(module.state_dict()), dict(restless().state_dict()))
    model = run.personal(1) if method not in (*ADAPTED, *WITHOUT) else run.model
    with torch.no_grad():
        next(model.parameters()).zero_()  # what is handed out is a copy
    assert same(run.client_state(1), go(method, restless(), rounds=1, **FLOAT).client_state(1))


@every_method
def test_its_text_describes_it(method: str) -> None:
    parsed = Method.parse(method)
    assert Method.parse(str(parsed)).parts == parsed.parts


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith(("pfedhn", "plgu_ghn", "finetune"))])
def test_renaming_the_clients_renames_their_models_and_changes_nothing_else(method: str) -> None:
    """On the whole data, where no draw tells clients apart; a hypernetwork's first embeddings do."""
    world = world_of("momentum, weight decay", sizes=(4, 9, 5, 7))
    names = (2, 0, 3, 1)
    run, other = (run_library(w, method) for w in (world, world.but(data=[world.data[i] for i in names])))
    assert_close(other.server_weights, run.server_weights, 1e-9)
    for new, old in enumerate(names):
        for part, state in run.client_state(old).items():
            for name, tensor in state.items():
                assert_close(other.client_state(new)[part][name], tensor, 1e-8)
