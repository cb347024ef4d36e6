"""A damaged, mixed-up or older file is found before it is used and before anything is deleted."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_run, restless, world
from safetensors import safe_open
from torture.power import EXP, SIZES, go

import fedflat
from fedflat.errors import CheckpointError


class StopAfter(fedflat.Callback):
    """Ends a run after three rounds."""

    def round(self, run: fedflat.Run, metrics: Any) -> bool:
        return bool(metrics["round"] == 3)


def contents(folder: Path) -> dict[str, bytes]:
    files = {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "whole"
    go(out)
    return out


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after three of four rounds, with checkpoints of rounds 2 and 3."""
    out = tmp_path_factory.mktemp("damage") / "part"
    go(out, callbacks=[StopAfter()])
    assert {"checkpoint-000002.safetensors", "checkpoint-000003.safetensors"} <= contents(out).keys()
    return out


@pytest.fixture
def run(part: Path, tmp_path: Path) -> Path:
    return shutil.copytree(part, tmp_path / "run")


def same_end(out: Path, whole: Path) -> None:
    assert_same_run(go(out), fedflat.load_run(whole, model=restless()), len(SIZES))
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_size_of_a_stack_is_that_of_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    exp = fedflat.Experiment(data="digits", model="logistic", clients=8, participation="all", rounds=4, lr=0.05)
    exp = exp.replace(backend="serial", stack="auto")
    seconds: Any = sys.modules["fedflat.runs.runner"]
    usual, seconds.CHECKPOINT_SECONDS = seconds.CHECKPOINT_SECONDS, 0.0
    try:
        fedflat.run(exp, out=tmp_path / "run", callbacks=[StopAfter()])
    finally:
        seconds.CHECKPOINT_SECONDS = usual
    index = tmp_path / "run" / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:-9])
    assert len(fedflat.run(exp, out=tmp_path / "run").metrics) == 4


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.json", "checkpoint-000003.safetensors", "clients"])
@pytest.mark.parametrize("place", [0.05, 0.3, 0.6, 0.99])
def test_a_flipped_bit_costs_rounds_but_no_result(run: Path, whole: Path, name: str, place: float) -> None:
    path = next((run / "clients").rglob("*.3.safetensors")) if name == "clients" else run / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    same_end(run, whole)


@pytest.mark.parametrize("change", [(b'"round": 3', b'"round": 2'), (b'"stopped": "', b'"stopped": "x')])
def test_a_changed_index_is_not_believed(
    run: Path, whole: Path, change: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(*change, 1))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        fedflat.load_run(run, model=restless())
    with caplog.at_level(logging.WARNING):
        same_end(run, whole)
    assert "continuing from round 2" in caplog.text


def test_states_that_changed_places_are_found(run: Path) -> None:
    one, other = sorted((run / "clients").rglob("*.safetensors"))[:2]
    (run / "swap").write_bytes(one.read_bytes())
    other.replace(one)
    (run / "swap").rename(other)
    loaded, found = fedflat.load_run(run, model=restless()), []
    for client in range(len(SIZES)):
        try:
            loaded.client_state(client)
        except CheckpointError as error:
            found.append(str(error))
    assert found and all("holds something else" in text for text in found)


def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_deleted(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    engine = fedflat.run(EXP.replace(seed=7), federation=world(SIZES), model=restless(), out=other)
    assert engine.status == "finished"
    (run / "experiment.toml").write_bytes((other / "experiment.toml").read_bytes())
    before = contents(run)
    with pytest.raises(CheckpointError, match="of another run"):
        fedflat.load_run(run, model=restless())
    with pytest.raises(CheckpointError):
        fedflat.run(EXP.replace(seed=7), federation=world(SIZES), model=restless(), out=run)
    assert contents(run) == before


def test_with_both_checkpoints_damaged_the_run_is_refused_and_nothing_is_deleted(run: Path) -> None:
    for name in ("checkpoint.json", "checkpoint-previous.json"):
        (run / name).write_bytes((run / name).read_bytes()[:-9])
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged \(it is incomplete\)"):
        go(run)
    assert contents(run) == before


def test_files_that_are_not_the_runs_stay(run: Path, whole: Path) -> None:
    strangers = ["checkpoint-000001.safetensors", "clients/0/9.9.safetensors", ".notes.1.tmp", "clients/notes.txt"]
    for name in strangers:
        (run / name).write_bytes(b"mine")
    same_end(run, whole)
    assert [(run / name).read_bytes() for name in strangers] == [b"mine"] * len(strangers)


@pytest.mark.parametrize("damage", ["missing", "older", "cut"])
def test_the_model_of_a_finished_run_is_that_of_its_last_round(whole: Path, tmp_path: Path, damage: str) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / "model.safetensors"
    content = path.read_bytes()
    {"missing": path.unlink, "older": lambda: shutil.copy(run / "best.safetensors", path)}.get(
        damage, lambda: path.write_bytes(content[:-8])
    )()
    if damage == "older":
        with safe_open(path, "pt") as file:
            assert file.metadata()["round"] != "4"
    go(run)
    assert path.read_bytes() == content
