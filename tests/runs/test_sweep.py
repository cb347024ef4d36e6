"""Grids and searches from the command line, run for real on the digits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedflat.cli import main
from fedflat.errors import CheckpointError, InputError
from fedflat.experiment import Experiment
from fedflat.runs.search import Dimension, Search, changed
from fedflat.specs import combinations, values_in

SMALL = Experiment(
    data="digits",
    partition="iid",
    clients=8,
    participation="uniform(2)",
    model="logistic",
    rounds=4,
    local_epochs=1,
    backend="serial",
)
WORDS = [
    *("--data", "digits", "--partition", "iid", "--clients", "8", "--participation", "uniform(2)"),
    *("--model", "logistic", "--rounds", "4", "--local-epochs", "1", "--backend", "serial"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


# ---- reading grids ----


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("lr", "0.01,0.1", [0.01, 0.1]),
        ("lr", "1e-3", [0.001]),
        ("seed", "0..2", [0, 1, 2]),
        ("seed", "0..1, 7,7", [0, 1, 7]),
        ("clip", "none,10", [None, 10.0]),
        ("drop_last", "true,false", [True, False]),
        ("partition", "lda_hsu(alpha=0.5),iid", ["lda_hsu(alpha=0.5)", "iid"]),
        ("method", "fedavg, gradaug(n=1, width=0.5)+sam", ["fedavg", "gradaug(n=1, width=0.5)+sam"]),
        ("model", "mlp(hidden=(64, 32)),logistic", ["mlp(hidden=(64, 32))", "logistic"]),
        ("data", "npz(path='a,b.npz')", ["npz(path='a,b.npz')"]),
        ("head", "layer1.0", ["layer1.0"]),
    ],
)
def test_values_in_one_option(name: str, text: str, values: list[Any]) -> None:
    assert values_in(name, text) == values


@pytest.mark.parametrize(
    ("name", "text"), [("seed", "2..0"), ("seed", "0..99999999"), ("lr", "0..2"), ("seed", "a..b")]
)
def test_what_is_no_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(InputError, match=name):
        values_in(name, text)


def test_seeds_vary_fastest() -> None:
    points = combinations({"seed": "0..1", "lr": "1,2", "rounds": "3"})
    assert [(point["lr"], point["seed"]) for point in points] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert combinations({}) == [{}]


# ---- running grids ----


def test_a_grid_runs_resumes_and_ends_with_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", *WORDS, "--lr", "0.01,0.1", "--seed", "0..1", "--out", "g"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    folders = sorted(path.parent for path in Path("g").glob("*/experiment.toml"))
    assert len(folders) == 4 and "3 of 4 runs done, about" in err
    experiments = {Experiment.from_toml(folder / "experiment.toml") for folder in folders}
    assert experiments == {SMALL.replace(lr=lr, seed=seed) for lr in (0.01, 0.1) for seed in (0, 1)}
    assert all(f"fedavg, lr={lr}, seed={seed}" in out for lr in (0.01, 0.1) for seed in (0, 1))
    before = {folder: (folder / "checkpoint.json").stat().st_mtime_ns for folder in folders}
    assert main([*argv[:-4], "--seed", "0..2", "--out", "g", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert {folder: (folder / "checkpoint.json").stat().st_mtime_ns for folder in folders} == before


def test_bad_input_in_one_run_means_that_none_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["uniform(2),uniform(9)" if word == "uniform(2)" else word for word in WORDS]
    assert main(["run", *words, "--out", "g"]) == 2
    assert "samples 9 of 8 clients" in capsys.readouterr().err
    assert main(["run", *WORDS, "--method", "fedavg,fedavgg", "--out", "g"]) == 2
    assert not Path("g").exists()


def test_a_grid_of_runs_on_natural_clients_trains_all_of_them() -> None:
    words = ["--data", "heart", "--model", "logistic", "--rounds", "1", "--method", "fedavg,fedcm", "--out", "g"]
    assert main(["run", *words]) == 0
    rows = [json.loads(line) for path in Path("g").glob("*/clients.jsonl") for line in path.read_text().splitlines()]
    assert sorted(row["client"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_run_that_diverges_is_told_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", *WORDS, "--lr", "1e30,0.1", "--clip", "none", "--weight-decay", "1", "--out", "g"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("failed: g/fedavg-digits-s0-") and "round" in err.splitlines()[-1]
    assert "lr=0.1 " in out
    done = [json.loads(path.read_text())["round"] for path in Path("g").glob("*/checkpoint.json")]
    assert 4 in done


# ---- searching ----


def test_an_argument_inside_a_field_can_be_searched() -> None:
    e = changed(Experiment(method="fedavg+sam(rho=0.1)"), {"method.sam.rho": 0.2, "lr": 0.5})
    assert (e.method, e.lr) == ("fedavg+sam(rho=0.2)", 0.5)
    assert changed(e, {"partition.dirichlet_equal.delta": 0.9}).partition == "dirichlet_equal(delta=0.9)"
    with pytest.raises(
        InputError, match=r"unknown name in method='fedavg\+sam\(rho=0.2\)': 'asam': did you mean 'sam'"
    ):
        changed(e, {"method.asam.rho": 0.2})


@pytest.mark.parametrize(
    ("text", "said"),
    [("lr", "write field=law"), ("lr=lg(1,2)", "did you mean 'log'"), ("lr=[1]", "cannot read")],
)
def test_a_search_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Dimension.parse(text)


def test_without_optuna_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", *WORDS, "--search", "lr=log(0.1,1)"]) == 2
    assert "pip install 'fedflat[sweep]'" in capsys.readouterr().err


def search(out: str = "s", **options: Any) -> Search:
    pytest.importorskip("optuna", reason="searching needs the extra `sweep`")
    return Search(
        SMALL, [Dimension.parse("lr=log(0.001, 1)"), Dimension.parse("batch_size=int(8, 64)")], out, **options
    )


def values(found: Search) -> list[dict[str, Any]]:
    return [trial.params for trial in found.ended]


def test_a_search_that_is_interrupted_goes_on_as_if_it_had_not_been() -> None:
    whole = search("whole")
    for _ in range(3):
        whole.step()
    search("parts").step()
    killed = search("parts")
    trial = killed.study.ask()  # a process that dies here leaves a trial without an end
    killed.dimensions[0].suggest(trial)
    again = search("parts")
    again.step()
    assert again.study.get_trials()[-1].params["lr"] == trial.params["lr"]
    again.step()
    assert len(values(again)) == len(values(whole)) == 3
    assert values(search("parts"))[0] == values(whole)[0]
    lines = Path("parts/trials.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    with pytest.raises(CheckpointError, match="holds another search"):
        Search(SMALL.replace(rounds=5), again.dimensions, "parts")


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_search_killed_while_it_was_written_down_goes_on(written: int) -> None:
    """Each attribute is a line of the journal of its own; the process dies after some of them."""
    search("s")
    journal = Path("s/trials.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    attributes = [place for place, line in enumerate(lines) if "user_attr" in line]
    assert len(attributes) == 3
    journal.write_text("".join(lines[: attributes[written]]))
    again = search("s")
    again.step()
    assert len(again.ended) == 1


def test_proposals_depend_on_the_trials_so_far_only() -> None:
    straight, stopped = search("a"), search("b")
    for _ in range(3):
        straight.step()
        stopped.step()
        stopped = search("b")
    assert values(straight) == values(stopped)


def test_bad_trials_are_stopped_early() -> None:
    found = search(prune=True)
    for lr in (0.3, 0.4, 0.5, 0.6, 0.7, 1e-3):
        found.study.enqueue_trial({"lr": lr, "batch_size": 16})
        found.step()
    states = [trial.state.name for trial in found.ended]
    assert states == ["COMPLETE"] * 5 + ["PRUNED"]
    rounds = Path("s", found.ended[-1].user_attrs["folder"], "metrics.jsonl").read_text().splitlines()
    assert 1 <= len(rounds) < SMALL.rounds


def test_sweep_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="searching needs the extra `sweep`")
    argv = ["sweep", *WORDS, "--search", "lr=choice(0.1, 1e30)", "--clip", "none", "--weight-decay", "1"]
    assert main([*argv, "--trials", "4", "--out", "s"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if "fedavg-digits" in line]
    assert len(rows) == 4 and float(rows[0][0]) > 0.5 and "s/best.toml" in err
    assert any("failed:" in row for row in rows)
    assert Experiment.from_toml("s/best.toml").lr == 0.1
    assert main([*argv, "--trials", "4", "--out", "s"]) == 0
    assert "round" not in capsys.readouterr().err
    assert main(["sweep", *WORDS, "--lr", "0.1,0.2", "--search", "clip=choice(1.0, 2.0)"]) == 2
    assert "one value per field" in capsys.readouterr().err
