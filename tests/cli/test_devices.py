"""Every command that computes does so on the device that it is given, here on make-believe ones."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from make_believe import HERE, on_make_believe

import fedflat
from fedflat.cli import main
from fedflat.studies.study import STUDIES

WORDS = [
    *("--data", "digits", "--partition", "iid", "--clients", "4", "--participation", "uniform(3)"),
    *("--model", "logistic", "--rounds", "2", "--local-steps", "2", "--backend", "serial"),
]
TABLE = """
title = "One method on the digits"
source = "nowhere"

[columns]
"trace" = { BASE, quantity = "trace" }

[rows]
"FedAvg" = { method = "fedavg" }

[figures]
"FedAvg" = ["1"]
"""
BASE = (
    'data = "digits", partition = "iid", clients = 4, participation = "uniform(2)", model = "mlp(hidden=2)", '
    'rounds = 1, local_steps = 1, backend = "serial"'
)


def computed_on(command: list[str]) -> set[str]:
    """The devices on which a command computes."""
    HERE.computed_on.clear()
    assert main(command) == 0
    return set(HERE.computed_on)


@on_make_believe
def test_runs_and_analyses_of_a_device_have_the_numbers_of_the_cpu(folder: str) -> None:
    os.chdir(folder)
    for device, name in (("cpu", "here"), ("gpu:0,gpu:1", "there")):
        assert computed_on(["run", *WORDS, "--device", device, "--out", name]) == set(device.split(",")) - {"cpu"}
    what = [name for name, study in STUDIES.items() if study.runs == 1 and name not in ("spectrum", "density")]
    asked = ["analyze", "here", "--what", ",".join(what), "--samples", "12"]
    assert computed_on([*asked, "--out", "from-cpu", "--device", "cpu"]) == set()
    assert computed_on([*asked, "--out", "from-gpu", "--device", "gpu:1"]) == {"gpu:1"}
    for name in what:
        here, there = (json.loads(Path(f"from-{d}pu/here/{name}.json").read_text()) for d in "cg")
        assert (here.pop("device"), there.pop("device")) == ("cpu", "gpu:1")
        assert there == here, name
    left, right = (fedflat.load_run(name) for name in ("here", "there"))
    assert torch.equal(left.weights, right.weights)


@on_make_believe
def test_costs_are_timed_and_tables_reproduced_on_a_device(folder: str) -> None:
    os.chdir(folder)
    small = ["--model", "lenet5", "--methods", "sam", "--rounds", "1", "--samples", "2", "--batch-size", "2"]
    assert computed_on(["cost", *small, "--device", "gpu:1"]) == {"gpu:1"}
    Path("tiny.toml").write_text(TABLE.replace("BASE", BASE))
    assert computed_on(["reproduce", "tiny.toml", "--seeds", "0", "--device", "gpu:0,gpu:1"]) == {"gpu:0", "gpu:1"}
    assert {json.loads(path.read_text())["device"] for path in Path("runs").rglob("environment.json")} == {
        "gpu:0, gpu:1"
    }
    assert {json.loads(path.read_text())["device"] for path in Path("runs").rglob("curvature.json")} == {"gpu:0"}


@pytest.mark.skipif(find_spec("optuna") is None, reason="searching needs the extra `sweep`")
@on_make_believe
def test_a_search_trains_on_devices(folder: str) -> None:
    os.chdir(folder)
    search = ["sweep", *WORDS, "--search", "lr=choice(0.1)", "--trials", "1", "--device", "gpu:0,gpu:1"]
    assert computed_on(search) == {"gpu:0", "gpu:1"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_an_analysis_takes_one_device_that_is_there(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", *WORDS, "--out", "run", "--quiet"]) == 0
    for device, told in (("cuda:99", "this machine has: cpu"), ("cpu,cpu", ""), ("tpu", "this machine has: cpu")):
        capsys.readouterr()
        status = main(["analyze", "run", "--what", "generalisation", "--device", device, "--samples", "10"])
        assert status == (2 if told else 0)
        assert told in capsys.readouterr().err
