"""Tasks through a run: which metrics are recorded, which one leads, on which test sets, and what readers see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat.errors import InputError
from fedflat.report.html import report
from fedflat.runs.records import record_of
from fedflat.tasks import Task
from fedflat.tasks.losses import HardestPixels


def world(outputs: int = 1) -> fedflat.Federation:
    """Three clients with linear data, and test sets that differ."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=draw)
    y = x @ torch.randn(4, outputs, generator=draw)
    train = [(x[:30], y[:30]), (x[30:60], y[30:60]), (x[60:80], y[60:80])]
    return fedflat.Federation(train, {"seen": (x[80:], y[80:]), "unseen": (x[80:] + 1, y[80:])}, train, name="linear")


def plain(**fields: Any) -> fedflat.Experiment:
    usual = {"rounds": 4, "lr": 0.05, "participation": "all", "backend": "serial", "weight_decay": 0.0}
    return fedflat.Experiment(**usual | fields)


def test_a_regression_is_judged_by_its_error(tmp_path: Path) -> None:
    run = fedflat.run(plain(), federation=world(), model=nn.Linear(4, 1), out=tmp_path / "run")
    first, last = run.metrics[0], run.metrics[-1]
    assert last["rmse"] ** 2 == pytest.approx(last["loss"], rel=1e-6) and 0 < last["rmse"] < first["rmse"]
    assert {"rmse", "mae", "r2", "unseen_rmse", "unseen_loss"} <= set(last) and last["unseen_rmse"] > last["rmse"]
    assert run.best == {"round": 4, "rmse": last["rmse"]}  # less is better
    record = record_of(tmp_path / "run")
    assert record.lead == "rmse" and record.falls("unseen_rmse") and not record.is_share("rmse")
    assert record.best() == (4, last["rmse"]) and record.falls("clients_low5") and not record.falls("r2")
    assert run.evaluations[0]["common"] > 0 and "common_mae" in run.evaluations[0]
    fairness = run.fairness()
    assert fairness.low5 == fairness.max and fairness.top5 == fairness.min  # the worst client has the largest error
    assert "rmse" in repr(run) and "rmse" in repr(fedflat.compare([tmp_path / "run"]))
    page = report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "RMSE on the unseen test set" in page and "Accuracy" not in page


def test_a_loaded_run_knows_its_task(tmp_path: Path) -> None:
    fedflat.run(plain(rounds=1, model="mlp"), federation=world(2), out=tmp_path / "run")
    loaded = fedflat.load_run(tmp_path / "run")
    assert loaded.task["lead"] == "rmse" and loaded.task["tests"] == ["unseen"]
    assert loaded.model(torch.zeros(1, 4)).shape == (1, 2)
    assert json.loads((tmp_path / "run/environment.json").read_text())["inputs"]["task"]["name"] == "regression"


def test_metrics_that_are_asked_for_and_metrics_of_your_own() -> None:
    def bias(output: Tensor, y: Tensor) -> Tensor:
        return (output - y).mean()

    e = plain(data="digits", model="logistic", clients=5, rounds=2)
    run = fedflat.run(e, metrics=["top5", "ece", "macro_f1", "auc"])
    last = run.metrics[-1]
    assert last["accuracy"] <= last["top5"] <= 1 and 0 < last["ece"] < 1 and run.best["accuracy"] <= last["top5"]
    mine = fedflat.run(plain(rounds=1), federation=world(), model=nn.Linear(4, 1), metrics={"bias": bias})
    assert mine.metrics[-1]["bias"] is not None and mine.task["lead"] == "rmse"
    with pytest.raises(InputError, match="metric 'rmse' cannot be computed"):
        fedflat.run(e, metrics="rmse")


def test_without_a_metric_the_loss_leads() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.layer(x)}

    def loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
        return output["out"].square().mean() + y.mean()

    run = fedflat.run(plain(), federation=world(), model=Pair(), loss=loss)
    assert run.task["lead"] == "loss" and run.best == {"round": 4, "loss": run.metrics[-1]["loss"]}


def test_a_task_of_your_own_is_one_small_class() -> None:
    class Counting(Task):
        """How often something happens: Poisson regression, judged by the mean absolute error."""

        name = "counting"
        metrics = ("mae",)

        def loss(self, output: Any, y: Tensor) -> Tensor:
            return F.poisson_nll_loss(output, y.reshape(output.shape))

    x = torch.rand(40, 2)
    fed = fedflat.Federation([(x, (3 * x[:, 0]).floor())] * 2, (x, (3 * x[:, 0]).floor()), task=Counting())
    run = fedflat.run(plain(), federation=fed, model=nn.Linear(2, 1))
    assert run.task["lead"] == "mae" and run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_several_workers_measure_the_same(tmp_path: Path) -> None:
    e = plain(data="digits", model="mlp", clients=4, rounds=1)
    runs = [
        fedflat.run(e.replace(**how), metrics="auc,ece,macro_f1") for how in ({}, {"backend": "pool", "workers": 2})
    ]
    drop = {"seconds"}
    tables = [[{k: v for k, v in row.items() if k not in drop} for row in run.metrics] for run in runs]
    assert tables[0] == tables[1]
    assert [row["common_auc"] for row in runs[0].evaluations] == [row["common_auc"] for row in runs[1].evaluations]


def test_the_hardest_pixels() -> None:
    y = torch.randint(3, (2, 4, 4), generator=torch.Generator().manual_seed(0))
    constant = torch.zeros(2, 3, 4, 4)
    assert HardestPixels()(constant, y).item() == pytest.approx(torch.tensor(3.0).log().item())  # all equally hard
    output = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    each = F.cross_entropy(output, y, reduction="none").flatten(1)
    assert HardestPixels(1.0)(output, y).item() == pytest.approx(F.cross_entropy(output, y).item())
    assert HardestPixels(0.25)(output, y).item() == pytest.approx(each.topk(4, dim=1).values.mean().item())
    y[0, :2] = -100
    assert HardestPixels(1.0, valid_only=True)(output[:1], y[:1]) == pytest.approx(
        F.cross_entropy(output[:1], y[:1]).item()
    )
    assert HardestPixels(0.5)((output, output), y).item() == pytest.approx(2 * HardestPixels(0.5)(output, y).item())


def test_a_loss_by_name_and_a_wrong_one() -> None:
    e = plain(data="digits", model="logistic", clients=3, rounds=1)
    smooth = fedflat.run(e.replace(loss="cross_entropy(label_smoothing=0.2)"))
    assert smooth.metrics[-1]["loss"] != fedflat.run(e).metrics[-1]["loss"]
    with pytest.raises(InputError, match="ohem"):
        fedflat.run(e.replace(loss="ohm"))
