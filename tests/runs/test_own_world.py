"""Runs on data and models of the user's own: what records say of them, and the defaults they get."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, network, plain, world
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat import Experiment, Federation
from fedflat.cli import main
from fedflat.core import scheduler
from fedflat.errors import CheckpointError, InputError, PartError, RunError
from fedflat.report.html import document
from fedflat.report.notebook import summary
from fedflat.report.terminal import result_rows
from fedflat.runs.records import record_of


class Ratings(nn.Linear):
    """A model of one's own."""


def clinics(**options: object) -> Federation:
    return Federation([blobs(9, seed=i) for i in range(3)], test=blobs(12, seed=9), name="clinics", **options)


def test_records_tell_the_federation_and_the_model_that_were_run(tmp_path: Path) -> None:
    exp = Experiment(rounds=2, backend="serial", local_epochs=1)
    run = fedflat.run(exp, federation=clinics(), model=Ratings(4, 3), out=tmp_path / "run")
    told = run.experiment
    assert (told.data, told.partition, told.clients, told.model) == ("clinics", "own", 3, "Ratings")
    assert Experiment.from_toml(tmp_path / "run/experiment.toml") == told
    record = record_of(tmp_path / "run")
    for text in (repr(run), summary(record), document([record]), str(result_rows(record))):
        assert (
            "clinics" in text
            and "Ratings" in text
            and "3 clients" in text.replace("<dt>clients</dt><dd>3", "3 clients")
        )
        assert "cifar10" not in text and "cnn64" not in text and "100 clients" not in text
    assert "15 parameters" in repr(run) and record.details["loss"] == "cross_entropy"


@pytest.mark.parametrize("command", ["show", "compare"])
def test_tables_in_the_terminal_tell_what_was_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = Experiment(rounds=2, backend="serial", local_epochs=1)
    fedflat.run(exp, federation=clinics(), model=Ratings(4, 3), metrics="top5", out=tmp_path / "a")
    fedflat.run(exp.replace(lr=0.2), federation=clinics(), model=Ratings(4, 3), metrics="ece", out=tmp_path / "b")
    assert main([command, str(tmp_path / "a")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    both = "data clinics, 3 clients, partition own, model Ratings (15 parameters), loss cross_entropy"
    assert f"{both}, measured: accuracy top5" in told
    assert main([command, str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert both in told and "measured:" not in told  # runs differ in it


def test_all_clients_of_a_federation_take_part_unless_told_otherwise() -> None:
    exp = Experiment(rounds=2, backend="serial", local_epochs=1)
    run = fedflat.run(exp, federation=clinics(), model=Ratings(4, 3))
    assert run.experiment.participation == "all" and [row["clients"] for row in run.metrics] == [3, 3]
    one = fedflat.run(exp.replace(participation="uniform(1)"), federation=clinics(), model=Ratings(4, 3))
    assert [row["clients"] for row in one.metrics] == [1, 1]


def test_built_in_data_are_sampled_as_the_papers_do_however_they_are_passed() -> None:
    exp = Experiment(data="digits", partition="iid", clients=20, model="logistic", rounds=1, backend="serial")
    fed = fedflat.load_federation("digits", "iid", clients=20)
    named, passed = fedflat.run(exp), fedflat.run(exp, federation=fed)
    assert named.experiment == passed.experiment and named.experiment.participation == "bernoulli(0.1)"
    assert named.weights.equal(passed.weights)


def test_a_number_of_clients_that_contradicts_the_federation_is_refused() -> None:
    with pytest.raises(InputError, match="clients=5, but the federation has 3 clients: leave clients= out"):
        fedflat.run(plain(clients=5), federation=clinics(), model=network())
    assert fedflat.run(plain(clients=3), federation=clinics(), model=network()).experiment.clients == 3


@pytest.mark.parametrize("other", ["fedsam", "sam", "sam(0.05)", "sam+fedavg", "sam(rho=0.05)"])
def test_a_method_has_one_name_in_folders_and_when_a_run_is_resumed(other: str, tmp_path: Path) -> None:
    first = fedflat.run(plain(method="fedavg+sam"), federation=world(), model=network(), out=tmp_path)
    again = fedflat.run(plain(method=other), federation=world(), model=network(), out=tmp_path)
    assert again.experiment.method == "sam" and again.weights.equal(first.weights)


def test_values_are_spelled_in_one_way() -> None:
    assert str(fedflat.Method.parse("fedprox(1)")) == str(fedflat.Method.parse("fedprox(mu=1.0)")) == "fedprox(mu=1.0)"


# ---- folders of runs with a model of one's own ----


def test_a_folder_gives_its_tables_without_the_model_and_asks_for_it_where_weights_are_needed(tmp_path: Path) -> None:
    run = fedflat.run(plain(rounds=3), federation=clinics(), model=Ratings(4, 3).double(), out=tmp_path)
    bare = fedflat.load_run(tmp_path)
    assert bare.metrics == run.metrics and bare.clients == run.clients and bare.best == run.best
    assert all(np.array_equal(a, b) for a, b in zip(bare.curve("loss"), run.curve("loss"), strict=True))
    assert repr(bare) == repr(run) and bare.status == "finished" and bare.details == run.details
    for needs_weights in (lambda: bare.model, lambda: bare.weights, lambda: bare.client_state(0)):
        with pytest.raises(CheckpointError, match=r"a model of your own \(Ratings\).*pass it: load_run"):
            needs_weights()
    whole = fedflat.load_run(tmp_path, model=Ratings(4, 3))
    assert whole.weights.equal(run.weights) and whole.model is whole.model


def test_a_part_that_a_folder_names_and_nobody_knows_must_be_imported(tmp_path: Path) -> None:
    fedflat.run(plain(), federation=clinics(), model=network(), out=tmp_path)
    file = tmp_path / "experiment.toml"
    file.write_text(file.read_text().replace('method = "fedavg"', 'method = "nudger"'))
    with pytest.raises(CheckpointError, match=r"unknown method 'nudger'.*--import MODULE"):
        fedflat.load_run(tmp_path, model=network())


def test_a_report_replaces_reports_only(tmp_path: Path) -> None:
    run = fedflat.run(plain(), federation=clinics(), model=network())
    mine = tmp_path / "mine.html"
    mine.write_text("<html>my thesis</html>")
    with pytest.raises(InputError, match=r"mine.html exists and is not a report of fedflat"):
        run.report(mine)
    assert mine.read_text() == "<html>my thesis</html>"
    assert run.report(run.report(tmp_path / "report.html")).exists()


# ---- faulty parts and models ----


@dataclass(frozen=True)
class Faulty(fedflat.Part):
    """Does one thing wrong."""

    what: str = ""

    def end(self, local: Any) -> None:
        local.state(self)["steps"] = 3 if self.what == "state" else torch.tensor(3)

    def upload(self, local: Any, delta: torch.Tensor) -> torch.Tensor:
        return delta[1:] if self.what == "upload" else delta

    def combine(self, server: Any, updates: Any) -> Any:
        return None if self.what == "combine" else super().combine(server, updates)

    def end_round(self, server: Any) -> None:
        server.state(self)["note"] = "hello" if self.what == "note" else torch.tensor(0)


@pytest.fixture
def faulty() -> None:
    fedflat.register(Faulty)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("combine", r"the slot combine of the part 'faulty' must return a tensor of shape \(43,\), not NoneType"),
        ("upload", r"the slot upload of the part 'faulty' must return .*\(43,\), not one of shape \(42,\)"),
        ("state", r"the part 'faulty' keeps 'steps' in local.state\(self\), which holds tensors only, not int"),
        ("note", r"the part 'faulty' keeps 'note' in server.state\(self\), which holds tensors only, not str"),
    ],
)
@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_a_faulty_part_is_named(faulty: None, what: str, said: str, backend: str) -> None:
    exp = plain(method=f"faulty(what={what!r})", backend=backend, workers=1)
    with pytest.raises(InputError, match=said) as caught:
        fedflat.run(exp, federation=world(), model=network())
    assert backend == "pool" or isinstance(caught.value, PartError)


def test_a_loss_of_one_number_per_sample_is_refused_before_the_first_round() -> None:
    with pytest.raises(InputError, match=r"one number, the mean over the batch, not one of shape \(2,\)"):
        fedflat.run(plain(), federation=world(), model=network(), loss=nn.CrossEntropyLoss(reduction="none"))


def test_a_learning_rate_of_zero_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedflat"):
        fedflat.run(plain(lr=0.0), federation=world(), model=network())
    assert "lr is 0: the clients will not learn" in caplog.text


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_models_are_trained_uncompiled(inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    exp, results = plain(rounds=2, backend="pool", workers=1), []
    for compiled in (False, True, True):
        model = network()
        given = torch.compile(model) if compiled and not inside else model
        if compiled and inside:
            model[0] = torch.compile(model[0])
        results.append(fedflat.run(exp, federation=world(), model=given))
    assert all(run.weights.equal(results[0].weights) for run in results) and "trained uncompiled" in caplog.text
    assert results[1].model.state_dict().keys() == network().state_dict().keys()


class Asleep(nn.Linear):
    """Never answers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import threading

        if self.training:
            threading.Event().wait()
        return F.linear(x, self.weight, self.bias)


def test_a_worker_without_a_sign_of_life_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "QUIET", 0.1)
    monkeypatch.setattr(scheduler, "STUCK", 5)
    with pytest.raises(RunError, match=r"client 0 in round 1 .it has done nothing"):
        fedflat.run(plain(backend="pool", workers=1), federation=Federation([blobs(8)]), model=Asleep(4, 3).double())
