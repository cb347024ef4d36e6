"""Trackers, read back with their own readers: every round once, with the run's own figures, also after a kill."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import network, plain, start_python, world

import fedflat
from fedflat import InputError, tracking
from fedflat.cli import main
from fedflat.runs.callbacks import Callback
from fedflat.tracking.tracker import finite_metrics

PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
HERE = [name for name, needs in PACKAGES.items() if all(map(importlib.util.find_spec, needs))]
ROUNDS, KILLED, SAVED = 6, 4, 2  # the run is killed after round 4, when its checkpoint is of round 2
FIELDS = {"data": "digits", "partition": "iid", "clients": 8, "participation": "uniform(3)", "model": "logistic"}
OTHER = {"rounds": ROUNDS, "local_epochs": 1, "local_holdout": 0.3, "evaluate_every": 2, "evaluate_clients": 3}
EXP = fedflat.Experiment(**FIELDS, **OTHER, backend="serial")
SCRIPT = "import sys; from tracking import test_tracking; test_tracking.be_killed(sys.argv[1])"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in HERE, reason=f"{name} is not installed: pip install 'fedflat[track]'")


class Kill(Callback):
    """Saves after round `SAVED`, not any more after that, and kills the process after round `KILLED`."""

    def round(self, run: Any, metrics: Any) -> None:
        engine: Any = sys.modules["fedflat.runs.runner"]
        engine.CHECKPOINT_SECONDS = 0.0 if metrics["round"] <= SAVED else math.inf
        if metrics["round"] == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def be_killed(out: str) -> None:
    fedflat.run(EXP, out=out, callbacks=[*tracking.trackers(",".join(HERE)), Kill()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedflat.Run:
    """A run with every tracker there is, killed on the way and gone on with."""
    out = tmp_path_factory.mktemp("tracking") / "first"
    process = start_python(SCRIPT, out)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == -9, error
    assert json.loads((out / "checkpoint.json").read_text())["round"] == SAVED
    assert len((out / "metrics.jsonl").read_text().splitlines()) == KILLED - 1  # trackers have seen one more
    return fedflat.run(EXP, out=out, callbacks=tracking.trackers(",".join(HERE)))


def curves(run: fedflat.Run, *without: str) -> dict[str, list[tuple[int, float]]]:
    """{name: [(round, value)]} of all figures of a run."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in run.metrics:
        for name, value in finite_metrics(row).items():
            found.setdefault(name, []).append((row["round"], value))
    return {name: points for name, points in found.items() if name not in without}


def test_the_figures_are_those_of_the_metrics(run: fedflat.Run) -> None:
    assert [round for round, _ in curves(run)["accuracy"]] == [2, 4, 6]
    assert [round for round, _ in curves(run)["clients_low5"]] == [3, 6]
    assert "round" not in curves(run) and len(curves(run)["train_loss"]) == ROUNDS
    assert finite_metrics({"round": 1, "loss": math.inf, "accuracy": None, "lr": 0.1}) == {"lr": 0.1}


# ---- TensorBoard ----


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return found.Reload()


def scalars(found: Any) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def in_float32(points: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(round, float(np.float32(value))) for round, value in row] for name, row in points.items()}


@needs("tensorboard")
def test_tensorboard_has_every_round_once(run: fedflat.Run) -> None:
    assert run.out
    found = events(run.out / "tensorboard")
    assert scalars(found) == in_float32(curves(run))
    times = [event.wall_time for event in found.Scalars("train_loss")]
    gaps, seconds = np.diff(times), np.array([row["seconds"] for row in run.metrics[1:]])
    assert times == sorted(times) and np.allclose(gaps[: SAVED - 1], seconds[: SAVED - 1], atol=1e-3)


@needs("tensorboard")
def test_tensorboard_has_the_distribution_over_the_clients(run: fedflat.Run) -> None:
    assert run.out
    found = events(run.out / "tensorboard").Histograms("clients_accuracy")
    assert [event.step for event in found] == [3, 6]
    for event in found:
        row = run.metrics[event.step - 1]
        value = event.histogram_value
        assert (value.num, value.min, value.max) == (8, row["clients_min"], row["clients_max"])
        assert math.isclose(value.sum / value.num, row["clients_mean"])


@needs("tensorboard")
def test_tensorboard_has_the_fields_of_the_experiment(run: fedflat.Run) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert run.out
    metadata = events(run.out / "tensorboard").SummaryMetadata("_hparams_/session_start_info")
    fields = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert set(fields) == set(EXP.to_dict())
    assert fields["method"].string_value == "fedavg" and fields["lr"].number_value == EXP.lr
    assert fields["local_steps"].string_value == "none" and fields["nesterov"].bool_value is False


@needs("tensorboard")
def test_a_run_that_has_ended_can_be_copied(
    run: fedflat.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.out
    tracking.TensorBoard(folder=str(tmp_path / "events")).copy(fedflat.load_run(run.out))
    assert scalars(events(tmp_path / "events")) == in_float32(curves(run))
    copy = tmp_path / "run"
    shutil.copytree(run.out, copy, ignore=shutil.ignore_patterns("tensorboard", "wandb", "mlflow"))
    (tmp_path / "exp.toml").write_text(EXP.to_toml())
    assert main(["run", str(tmp_path / "exp.toml"), "--out", str(copy), "--track", "tensorboard", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{copy}\n"
    assert scalars(events(copy / "tensorboard")) == in_float32(curves(run))


# ---- MLflow ----


@needs("mlflow")
def test_mlflow_has_one_run_with_every_round_once(run: fedflat.Run) -> None:
    from mlflow import MlflowClient

    assert run.out
    client = MlflowClient(f"sqlite:///{run.out}/mlflow/mlflow.db")
    project = client.get_experiment_by_name("fedflat")
    assert project
    (found,) = client.search_runs([project.experiment_id])
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    points = {name: [(metric.step, metric.value) for metric in row] for name, row in history.items()}
    # Rounds 3 and 4 are those of the process that was killed: the same but for the time they took.
    assert [round for round, _ in points.pop("seconds")] == list(range(1, ROUNDS + 1))
    assert points == curves(run, "seconds")
    assert found.data.params == {name: str(value) for name, value in EXP.to_dict().items()}
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert names == {"experiment.toml", "environment.json", "metrics.jsonl"}


@needs("mlflow")
def test_mlflow_is_told_how_a_run_ended(run: fedflat.Run) -> None:
    from mlflow import MlflowClient

    class Fail(Callback):
        def round(self, run: Any, metrics: Any) -> None:
            raise OSError("the disk is full")

    assert run.out
    uri = f"sqlite:///{run.out}/mlflow/mlflow.db"
    with pytest.raises(OSError, match="the disk is full"):
        fails = [tracking.MLflow(uri, project="failures"), Fail()]
        fedflat.run(plain(), federation=world(), model=network(), callbacks=fails)
    client = MlflowClient(uri)
    project = client.get_experiment_by_name("failures")
    assert project
    (found,) = client.search_runs([project.experiment_id])
    assert found.info.status == "FAILED" and found.data.metrics["clients"] == 3


# ---- Weights & Biases ----


def records(path: Path) -> Iterator[Any]:
    """The records of an offline file: a header of seven bytes, then a log of blocks as LevelDB keeps it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:  # no record begins so near to the end of a block
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


def items(entries: Any) -> dict[str, Any]:
    """Values by name; those inside of another value are left out."""
    plain = {(entry.key or ".".join(entry.nested_key)): json.loads(entry.value_json) for entry in entries}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


@needs("wandb")
def test_wandb_has_one_folder_with_every_round_once(run: fedflat.Run) -> None:
    assert run.out
    (folder,) = (run.out / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    found, points, spread = list(records(file)), dict[str, list[tuple[int, float]]](), list[int]()
    for row in (record.history for record in found if record.HasField("history")):
        round = next(json.loads(item.value_json) for item in row.item if "_step" in (item.key, *item.nested_key))
        values = items(row.item)
        spread += [round] if "clients_accuracy.bins" in values or "clients_accuracy" in values else []
        for name, value in values.items():
            if not name.startswith("clients_accuracy"):
                points.setdefault(name, []).append((round, value))
    assert points == curves(run) and spread == [3, 6]
    (start,) = (record.run for record in found if record.HasField("run"))
    assert (start.project, start.display_name) == ("fedflat", "first")
    assert items(start.config.update) == EXP.to_dict()
    (exit,) = (record.exit for record in found if record.HasField("exit"))
    assert exit.exit_code == 0
    assert (folder / "files/metrics.jsonl").read_text() == (run.out / "metrics.jsonl").read_text()


# ---- what is refused ----


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name, "torch.utils.tensorboard"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"is not installed: pip install 'fedflat\[track\]'"):
        tracking.trackers(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in PACKAGES])
def test_a_run_without_a_folder_needs_a_place(name: str) -> None:
    with pytest.raises(InputError, match="where is it to be tracked"):
        fedflat.run(plain(), federation=world(), model=network(), callbacks=tracking.trackers(name))
