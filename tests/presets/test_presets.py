"""The papers' set-ups: that they are those of the papers, and that what a user writes wins over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedflat
from fedflat.cli import main
from fedflat.cli.experiments import experiments_of
from fedflat.cli.parser import Parser
from fedflat.cli.run import configure
from fedflat.core.method import Method
from fedflat.engine.assembly import check_spelling
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.presets import Preset, all_presets, load_preset
from fedflat.report.paper_table import load_table, table_files
from fedflat.report.quantities import QUANTITIES
from fedflat.specs import parse

PRESETS = all_presets()


def made(*words: str) -> list[Experiment]:
    """The experiments of `fedflat run` with these words."""
    parser = Parser(prog="fedflat run", description=None)
    configure(parser)
    return experiments_of(parser.parse(words))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_experiment_with_all_its_alternatives(name: str) -> None:
    preset = PRESETS[name]
    check_spelling(preset.make())
    for field, values in preset.alternatives.items():
        assert preset.experiment[field] in values
        for value in values:
            check_spelling(preset.make(**{field: value}))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.id)
def test_a_preset_names_real_fields_parts_and_quantities(preset: Preset) -> None:
    known = set(Experiment.__dataclass_fields__)
    assert {*preset.experiment, *preset.alternatives, *preset.from_code, *preset.chosen} <= known
    assert parse(preset.report).name in QUANTITIES and preset.version >= 1 and preset.paper in preset.id
    tables = [preset.methods, *(case.get("methods", {}) for case in preset.cases)]
    for part, values in ((part, values) for table in tables for part, values in table.items()):
        Method.parse(f"{part}({', '.join(f'{field}={value!r}' for field, value in values.items())})")


def test_presets_and_tables_name_each_other() -> None:
    for name in table_files():
        paper, what = name.split("/")
        for column in load_table(name).columns.values():
            preset = load_preset(column["preset"])
            number = what.removeprefix("table")
            assert preset.paper == paper and (number == what or number in preset.tables), (name, preset.id)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("s000_c100", {"clients": 100, "rounds": 500, "batch_size": 50, "lr": 0.1, "lr_decay": 0.998, "clip": 10.0}),
        ("s000_c100", {"participation": "bernoulli(0.1)", "evaluated": "all", "weight_decay": 1e-3, "local_epochs": 5}),
        ("s000_tiny", {"data": "tiny_imagenet", "model": "cnn_tiny", "rounds": 500}),
        (
            "s001_c100",
            {"clients": 16, "rounds": 25, "local_epochs": 20, "momentum": 0.9, "nesterov": True, "clip": None},
        ),
        ("s001_c100_64x025", {"clients": 64, "participation": "uniform(16)", "rounds": 25}),
        ("s001_c10_64x025", {"data": "cifar10", "clients": 64, "rounds": 100}),
        ("s002_c100", {"partition": "pathological(labels=10)", "model": "wrn28_10_gn", "local_epochs": 5}),
        ("s002_tiny", {"clients": 20, "participation": "all", "partition": "pathological(labels=30)"}),
        (
            "s003_c10",
            {"lr": 0.01, "weight_decay": 4e-4, "batch_size": 64, "clients": 100, "rounds": 10000, "clip": None},
        ),
        ("s003_c100", {"data": "cifar100", "rounds": 20000, "lr": 0.01, "momentum": 0.0}),
        ("s003_pam", {"clients": 500, "batch_size": 20, "momentum": 0.9, "partition": "pam(alpha=0.1, beta=10)"}),
        ("s004_silo_c10_a02", {"clients": 10, "participation": "all", "local_epochs": 10, "weight_decay": 1e-5}),
        ("s004_dev_lenet", {"clients": 100, "participation": "uniform(10)", "local_epochs": 5, "model": "lenet5"}),
        ("s004_dev_resnet", {"clients": 50, "participation": "uniform(5)", "model": "resnet18_nonorm"}),
    ],
)
def test_set_ups_of_the_papers(name: str, facts: dict[str, Any]) -> None:
    experiment = fedflat.preset(name)
    assert {field: getattr(experiment, field) for field in facts} == facts


@pytest.mark.parametrize(
    ("name", "changes", "method"),
    [
        ("s003_c10", {"method": "fedavg+asam"}, "fedavg+asam(rho=0.7, eta=0.2)"),
        ("s003_c10", {"method": "fedasam"}, "fedasam(rho=0.7, eta=0.2)"),
        ("s003_c10", {"method": "fedavg+asam(rho=0.5)"}, "fedavg+asam(rho=0.5, eta=0.2)"),
        ("s003_c10", {"method": "fedavg+asam(0.5, 0.1)"}, "fedavg+asam(0.5, 0.1)"),
        ("s003_c10", {"method": "fedsam", "partition": "lda_hsu(100)"}, "fedsam(rho=0.02)"),
        ("s003_c100", {"method": "adabest+swa"}, "adabest(beta=0.8, mu=0.02)+swa(start=0.75, cycle=20, lr_min=0.0001)"),
        ("s003_c100", {"method": "fedsam"}, "fedsam(rho=0.02)"),
        ("s003_c100", {"method": "fedsam", "partition": "lda_hsu(alpha=0.5)"}, "fedsam(rho=0.05)"),
        ("s003_pam", {"method": "fedasam+mixup"}, "fedasam(rho=0.5, eta=0.0)+mixup(gamma=1.0)"),
        ("s000_tiny", {"method": "fedsam", "partition": "iid"}, "fedsam(rho=0.03)"),
        ("s000_tiny", {"method": "fedsam+man", "partition": "iid"}, "fedsam(rho=0.01)+man(zeta=0.1)"),
        ("s000_c100", {"method": "fedspeed"}, "fedspeed(rho=0.1, alpha=0.01)"),
        ("s001_c100", {"method": "fedprox"}, "fedprox(mu=0.0001)"),
        ("s004_dev_lenet", {"method": "feddyn+const"}, "feddyn(alpha=1.0)+const"),
    ],
)
def test_parts_have_the_papers_values_unless_they_are_written(name: str, changes: dict[str, Any], method: str) -> None:
    experiment = fedflat.preset(name, **changes)
    assert experiment.method == method
    Method.parse(experiment.method)


def test_a_part_may_need_other_fields() -> None:
    assert fedflat.preset("s001_c100", method="moon").model == "resnet56(projection=256)"
    assert fedflat.preset("s001_c100", method="moon", model="resnet56").model == "resnet56"
    assert fedflat.preset("s001_c100", method="fedalign").clip == 10.0


def test_options_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\nrounds = 7\nmethod = "fedavg+asam"\n')
    (experiment,) = made(str(file), "--preset", "s003_c10", "--rounds", "9")
    assert (experiment.lr, experiment.rounds, experiment.batch_size) == (0.5, 9, 64)
    assert experiment.method == "fedavg+asam(rho=0.7, eta=0.2)"


def test_every_point_of_a_grid_has_its_own_values() -> None:
    words = ("--preset", "s003_c10", "--method", "fedsam", "--partition", "lda_hsu(alpha=0),lda_hsu(alpha=100)")
    assert [experiment.method for experiment in made(*words)] == ["fedsam(rho=0.1)", "fedsam(rho=0.02)"]


SMALL = {"data": "digits", "partition": "iid", "clients": 8, "participation": "uniform(2)", "model": "logistic"}
SMALL |= {"augment": "none", "rounds": 2, "backend": "serial"}
WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
CHANGED = ["data", "partition", "clients", "participation", "model", "method", "rounds", "augment"]


def test_a_run_folder_names_its_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--method", "fedavg+asam", "--seed", "3", "--out", str(tmp_path / "a")]
    assert main(["run", "--preset", "s003_c10", *WORDS, *own]) == 0
    noted = json.loads((tmp_path / "a/environment.json").read_text())["preset"]
    assert noted == {"name": "s003_c10", "version": PRESETS["s003_c10"].version, "changed": CHANGED}
    said = f"preset s003_c10 v1, changed: {', '.join(CHANGED)}"
    capsys.readouterr()
    assert main(["show", str(tmp_path / "a")]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    page = fedflat.load_run(tmp_path / "a").report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert f"<dt>preset</dt><dd>{said.removeprefix('preset ')}</dd>" in page


def test_a_preset_is_a_note_and_changes_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--preset", "s003_c10", *WORDS, "--out", str(tmp_path / "a"), "--quiet"]) == 0
    file, rows = tmp_path / "a/experiment.toml", (tmp_path / "a/metrics.jsonl").read_text()
    for out in ("a", "b"):
        assert main(["run", str(file), "--out", str(tmp_path / out)]) == 0
    assert "holds this run, finished already" in capsys.readouterr().err
    assert (tmp_path / "a/metrics.jsonl").read_text() == rows
    runs = [fedflat.load_run(tmp_path / out) for out in ("a", "b")]
    assert runs[0].experiment == runs[1].experiment and torch.equal(runs[0].weights, runs[1].weights)
    assert main(["show", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "a: preset s003_c10 v1" in capsys.readouterr().out


def test_what_a_preset_changes_itself_is_not_said_to_be_changed() -> None:
    preset = PRESETS["s001_c100"]
    assert preset.record(preset.make(seed=5, workers=1))["changed"] == []
    assert preset.record(preset.make(method="moon"))["changed"] == ["method"]
    assert preset.record(preset.make(method="moon", model="resnet56"))["changed"] == ["model", "method"]
    assert preset.record(preset.make(momentum=0.5, nesterov=False))["changed"] == ["momentum", "nesterov"]


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["run", "--preset", "s003_c01"], "unknown preset 's003_c01': did you mean 's003_c10'?"),
        (
            ["run", "--preset", "s001_in200", "--data-root", "nowhere"],
            "200 of 200 classes have no folder in nowhere/imagenet/train, first n01729322",
        ),
        (["presets", "s03"], "unknown preset 's03'"),
    ):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(InputError, match="unknown field 'lrr'"):
        fedflat.preset("s003_c10", lrr=1)


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["presets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS)
    assert text.count("\npaper 00") == 5 and "paper 004: Federated Learning for Feature Generalization" in text
    assert main(["presets", "s002_c10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  lr = 0.01   (chosen here)" in lines and "  plgu_lf(rho=0.05, layers=5)" in lines
    assert "  participation = uniform(10)   (also all)" in lines


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("flsim_c10", "fedsmoo", "fedsmoo(rho=0.1, alpha=0.1)"),
        ("flsim_c10_200", "fedlesam_d(0.05)", "fedlesam_d(0.05, alpha=0.1)"),
        ("fedgloss_c10", "fedgloss", "fedgloss(rho=0.15, rho_l=0.15, beta=10.0, warmup=2000, rho_0=0.001)"),
        ("fedgloss_c100", "fedgloss", "fedgloss(rho=0.01, rho_l=0.2, beta=100.0, warmup=15000, rho_0=0.001)"),
    ],
)
def test_the_set_ups_of_later_papers_fill_in_their_values(name: str, method: str, text: str) -> None:
    made_here = load_preset(name).make(method=method)
    assert Method.parse(made_here.method).parts == Method.parse(text).parts
    assert made_here.clients == (200 if name.endswith("_200") else 100)


def test_fedgloss_shares_the_set_up_of_paper_003() -> None:
    left, right = (load_preset(name).make() for name in ("fedgloss_c10", "s003_c10"))
    assert left == right
