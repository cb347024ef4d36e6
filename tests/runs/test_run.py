"""A run and its folder: the files, what they hold, and what is refused."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_run, blobs, network, plain, restless, run_python, same, start_python, world
from safetensors import safe_open
from safetensors.torch import load_file

import fedflat
from fedflat import Experiment, Federation
from fedflat.errors import CheckpointError, FedflatError, InputError, InterruptedRunError

EXP = plain(rounds=4, method="diary", participation="uniform(2)", lr=0.3)


class StopAfter(fedflat.Callback):
    """Ends a run after a round, as if the user had come back later."""

    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, run: Any, metrics: Any) -> bool:
        return metrics["round"] == self.last


def start(out: Path | None, exp: Experiment = EXP, **options: Any) -> fedflat.Run:
    given: dict[str, Any] = {"federation": world(), "model": restless(), "out": out}
    return fedflat.run(exp, **(given | options))


def snapshot(folder: Path) -> dict[str, bytes]:
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def strict(line: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


# ---- the folder ----


def test_the_folder_holds_what_it_should_in_open_formats(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    names = {name.split("/")[0] for name in snapshot(tmp_path / "run")}
    assert names == {
        *("experiment.toml", "environment.json", "partition.json", "metrics.jsonl", "clients.jsonl"),
        *("model.safetensors", "best.safetensors", "checkpoint.json", "checkpoint-000004.safetensors", "clients"),
    }
    assert Experiment.from_toml(tmp_path / "run/experiment.toml") == run.experiment
    environment = strict((tmp_path / "run/environment.json").read_text())
    assert environment["torch"] == torch.__version__
    metrics = [strict(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    clients = [strict(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert metrics == run.metrics
    assert clients == run.clients
    assert [row["round"] for row in metrics] == [1, 2, 3, 4]
    assert {"accuracy", "loss", "train_loss", "lr", "clients", "seconds"} <= metrics[0].keys()
    assert [row["round"] for row in clients] == [1, 1, 2, 2, 3, 3, 4, 4]
    for path in (tmp_path / "run/clients").rglob("*.safetensors"):
        assert "diary/rounds_seen" in load_file(path)


def test_the_models_on_disk_load_into_the_users_module(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    for name in ("model", "best"):
        module = restless().double()
        module.load_state_dict(load_file(tmp_path / f"run/{name}.safetensors"))
        if name == "model":
            assert same(module.state_dict(), run.model.state_dict())
    with safe_open(tmp_path / "run/best.safetensors", "pt") as file:
        best = int(file.metadata()["round"])
    assert best == max(run.metrics, key=lambda row: (row["accuracy"], -row["round"]))["round"]
    module.eval()
    x, y = blobs(30, seed=1000)
    assert (module(x).argmax(1) == y).double().mean().item() == run.metrics[best - 1]["accuracy"]


def test_tables_are_json_also_where_nothing_was_trained(tmp_path: Path) -> None:
    start(tmp_path / "run", plain(local_epochs=0, rounds=2))
    for table in ("metrics", "clients"):
        for line in (tmp_path / f"run/{table}.jsonl").read_text().splitlines():
            strict(line)


def test_nothing_on_disk_is_pickled(tmp_path: Path) -> None:
    start(tmp_path / "run")
    for name, content in snapshot(tmp_path / "run").items():
        assert name.endswith((".toml", ".json", ".jsonl", ".safetensors"))
        assert not content.startswith((b"\x80", b"PK"))


def test_a_loaded_run_is_the_run(tmp_path: Path) -> None:
    run, loaded = start(tmp_path / "run"), fedflat.load_run(tmp_path / "run", model=restless())
    assert loaded.experiment == run.experiment
    assert_same_run(run, loaded, 3)
    assert loaded.metrics == run.metrics
    assert loaded.out == run.out == tmp_path / "run"
    assert repr(loaded) == repr(run)


def test_a_run_with_a_model_by_name_loads_without_data_or_model(tmp_path: Path) -> None:
    exp = plain(data="digits", partition="iid", clients=4, model="mlp(hidden=8)", dtype="float32", evaluated="all")
    run = fedflat.run(exp, out=tmp_path / "run")
    assert_same_run(run, fedflat.load_run(tmp_path / "run"), 4)


def test_a_run_in_memory_and_one_in_a_folder_agree(tmp_path: Path) -> None:
    assert_same_run(start(None), start(tmp_path / "run"), 3)
    assert start(None).out is None


def test_the_same_command_again_returns_the_finished_run_untouched(tmp_path: Path) -> None:
    class Untouchable(fedflat.Callback):
        def round(self, run: Any, metrics: Any) -> None:
            raise AssertionError("a finished run was run again")

    run, before = start(tmp_path / "run"), snapshot(tmp_path / "run")
    again = start(tmp_path / "run", callbacks=[Untouchable()])
    assert_same_run(run, again, 3)
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_run_stopped_and_gone_on_with_is_the_run(tmp_path: Path, stop: int, memory: int) -> None:
    part = start(tmp_path / "run", callbacks=[StopAfter(stop)], state_memory=memory)
    assert len(part.metrics) == stop
    assert_same_run(start(tmp_path / "run", state_memory=memory), start(None), 3)
    assert len(list((tmp_path / "run/clients").rglob("*.safetensors"))) <= 6  # of two checkpoints


def test_workers_and_back_end_may_change_on_the_way(tmp_path: Path) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(2)])
    assert_same_run(start(tmp_path / "run", EXP.replace(backend="pool", workers=2)), start(None), 3)


def test_an_unfinished_run_can_be_looked_at(tmp_path: Path) -> None:
    part = start(tmp_path / "run", callbacks=[StopAfter(2)])
    assert_same_run(part, fedflat.load_run(tmp_path / "run", model=restless()), 3)


# ---- looking must not touch ----


def test_loading_a_run_changes_nothing_in_its_folder(tmp_path: Path) -> None:
    """Another process may be writing there: states of a round that no checkpoint names yet are its own."""
    start(tmp_path / "run", callbacks=[StopAfter(2)])
    newer = tmp_path / "run/clients/0/0.99.safetensors"
    newer.write_bytes(b"being written by the process that runs")
    before = snapshot(tmp_path / "run")
    fedflat.load_run(tmp_path / "run", model=restless()).client_state(1)
    assert snapshot(tmp_path / "run") == before


def test_rows_of_rounds_past_the_checkpoint_are_not_the_runs(tmp_path: Path) -> None:
    part = start(tmp_path / "run", callbacks=[StopAfter(2)])
    with (tmp_path / "run/clients.jsonl").open("a") as file:
        file.write('{"round": 3, "client": 0}\n{"round": 3, "cli')
    loaded = fedflat.load_run(tmp_path / "run", model=restless())
    assert loaded.clients == part.clients


# ---- refusals ----


def test_a_folder_of_another_experiment_is_refused_naming_the_fields(tmp_path: Path) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(2)])
    before = snapshot(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"lr: 0\.3 there, 0\.2 here; seed: 0 there, 5 here") as caught:
        start(tmp_path / "run", EXP.replace(lr=0.2, seed=5))
    assert "momentum" not in str(caught.value)
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("rounds", [2, 4])
def test_other_data_or_another_model_are_refused(tmp_path: Path, rounds: int) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(rounds)])
    before = snapshot(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"other data .*differs: .*data"):
        start(tmp_path / "run", federation=world((6, 10, 16)))
    bent = Federation([(x + 1e-9, y) for x, y in (blobs(n, seed=i) for i, n in enumerate((6, 10, 14)))], test=blobs(30))
    with pytest.raises(CheckpointError, match="data"):
        start(tmp_path / "run", federation=bent)
    other = restless()
    with torch.no_grad():
        other[0].bias += 1e-6
    with pytest.raises(CheckpointError, match="model"):
        start(tmp_path / "run", model=other)
    with pytest.raises(CheckpointError, match="model"):
        start(tmp_path / "run", model=network())
    assert snapshot(tmp_path / "run") == before
    assert_same_run(start(tmp_path / "run"), start(None), 3)


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match=r"not a run folder and not empty.*thesis\.tex"):
        start(tmp_path)
    assert snapshot(tmp_path) == {"thesis.tex": b"precious"}


def test_nothing_is_tidied_in_a_folder_that_is_not_a_runs(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / ".draft.7.tmp").write_text("precious")
    with pytest.raises(CheckpointError, match="not a run folder"):
        start(tmp_path)
    assert snapshot(tmp_path) == {"notes/.draft.7.tmp": b"precious"}


class Killed(fedflat.Callback):
    """Ends a run before it has come to a checkpoint."""

    def start(self, run: Any) -> bool:
        raise KeyboardInterrupt


def test_a_run_that_begins_anew_with_other_data_tells_of_these(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        start(tmp_path / "run", callbacks=[Killed()])
    start(tmp_path / "run", federation=world((6, 10, 16)))
    start(tmp_path / "fresh", federation=world((6, 10, 16)))
    for name in ("partition.json", "environment.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(FedflatError, match="file"):
        start(tmp_path / out)


def test_loading_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no run"):
            fedflat.load_run(path)
    assert not (tmp_path / "nowhere").exists()


def test_the_weights_of_your_own_model_need_that_model(tmp_path: Path) -> None:
    start(tmp_path / "run")
    with pytest.raises(CheckpointError, match="model="):
        fedflat.load_run(tmp_path / "run").weights  # noqa: B018
    with pytest.raises(CheckpointError, match="model of another size"):
        fedflat.load_run(tmp_path / "run", model=network())


@pytest.mark.parametrize("name", ["checkpoint.json", "checkpoint-000002.safetensors", "experiment.toml"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_folder_is_refused_naming_the_file_and_nothing_is_deleted(
    tmp_path: Path, name: str, damage: str
) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(2)])
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    middle = whole.index(b"=", len(whole) // 2) + 1 if name.endswith("toml") else len(whole) // 2 - 1
    path.write_bytes({"cut": whole[:middle], "garbage": b"\xff" * len(whole), "empty": b""}[damage])
    before = snapshot(tmp_path / "run")
    for attempt in (lambda: start(tmp_path / "run"), lambda: fedflat.load_run(tmp_path / "run", model=restless())):
        if (name, damage) == ("experiment.toml", "empty"):
            continue  # an empty TOML file is an experiment of defaults, and another one
        with pytest.raises(InputError, match=name):
            attempt()
        assert snapshot(tmp_path / "run") == before
    path.write_bytes(whole)
    assert_same_run(start(tmp_path / "run"), start(None), 3)


def test_a_damaged_client_state_stops_the_run_naming_the_file(tmp_path: Path) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(2)])
    states = {path: path.read_bytes() for path in (tmp_path / "run/clients").rglob("*.safetensors")}
    for path, content in states.items():
        path.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=r"\d\.\d\.safetensors is damaged"):
        start(tmp_path / "run")
    for path, content in states.items():
        assert path.read_bytes() == content[:-5]
        path.write_bytes(content)
    assert_same_run(start(tmp_path / "run"), start(None), 3)


def test_a_damaged_table_stops_the_run_naming_the_file_and_nothing_is_deleted(tmp_path: Path) -> None:
    start(tmp_path / "run", callbacks=[StopAfter(3)])
    path = tmp_path / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0][: len(lines[0]) // 2] + "\n" + "".join(lines[1:]))
    before = snapshot(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl does not have all rows"):
        start(tmp_path / "run")
    assert snapshot(tmp_path / "run") == before


HOLDER = """
import sys, fedflat
from helpers import network, plain, world
class Wait(fedflat.Callback):
    def start(self, run):
        print("ready", flush=True)
        sys.stdin.readline()
fedflat.run(plain(rounds=2), federation=world(), model=network(), out=sys.argv[1], callbacks=[Wait()])
"""


def test_two_processes_cannot_run_in_one_folder(tmp_path: Path) -> None:
    holder = start_python(HOLDER, tmp_path / "run", stdin=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    exp, given = plain(rounds=2), {"federation": world(), "model": network(), "out": tmp_path / "run"}
    with pytest.raises(CheckpointError, match="in use by another process"):
        fedflat.run(exp, **given)
    _, error = holder.communicate("go\n", timeout=60)
    assert holder.returncode == 0, error
    assert len(fedflat.run(exp, **given).metrics) == 2


# ---- callbacks, documentation ----


def test_callbacks_see_the_run_from_start_to_end(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Log(fedflat.Callback):
        def start(self, run: Any) -> None:
            seen.append(("start", len(run.metrics)))

        def round(self, run: Any, metrics: Any) -> None:
            assert run.metrics[-1] == metrics
            seen.append(metrics["round"])

        def end(self, run: Any) -> None:
            seen.append("end")

    start(tmp_path / "run", callbacks=[Log(), StopAfter(2)])
    start(tmp_path / "run", callbacks=[Log()])
    assert seen == [("start", 0), 1, 2, "end", ("start", 2), 3, 4, "end"]


def test_real_data_are_learned_in_a_few_rounds() -> None:
    exp = Experiment(
        data="digits", partition="dirichlet_equal(delta=0.3)", clients=10, participation="uniform(5)", model="mlp",
        rounds=15, batch_size=20, workers=2,
    )  # fmt: skip
    run = fedflat.run(exp)
    assert run.metrics[-1]["accuracy"] > 0.85
    assert run.metrics[-1]["train_loss"] < run.metrics[0]["train_loss"]


WALK = pkgutil.walk_packages(fedflat.__path__, "fedflat.", onerror=lambda name: None)  # an extra may be missing
MODULES = [module.name for module in WALK if not module.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_documentation_are_true(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except (ModuleNotFoundError, InputError) as error:
        if "fedflat." in str(error):
            raise
        pytest.skip(str(error))
    assert doctest.testmod(module).failed == 0


def test_importing_the_package_imports_no_torch() -> None:
    assert run_python("import sys, fedflat; print('torch' in sys.modules)") == "False\n"


def test_the_environment_is_not_changed(tmp_path: Path) -> None:
    before, folder = dict(os.environ), Path.cwd()
    start(tmp_path / "run", EXP.replace(backend="pool", workers=2))
    assert dict(os.environ) == before
    assert Path.cwd() == folder
