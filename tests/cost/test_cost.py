"""What methods cost a client: the counts of paper 001's table 5, and counts taken here by hand."""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from models.test_slim import kept

from fedflat import Experiment
from fedflat.cli import main
from fedflat.cost import cost_of

CIFAR = (3, 32, 32)
MOON = "resnet56(projection=256)"
SIZES = (32, 28, 24, 20)
"""Resolutions of GradAug."""


@cache
def cost(method: str, model: str = "resnet56") -> Any:
    return cost_of(Experiment(method=method, model=model, batch_size=2), CIFAR, 100)


def resnet56(width: float = 1.0, size: int = 32) -> int:
    """Multiply-accumulates of ResNet-56 for one image, layer by layer: outputs times the inputs of one output."""
    planes = [kept(width, 16 * 2**stage) for stage in range(3)]
    inputs, total = planes[0], 27 * planes[0] * size**2
    for stage, inner in enumerate(planes):
        outputs = kept(width, 64 * 2**stage)
        for block in range(6):
            before, size = size, -(-size // 2) if stage and not block else size
            total += inputs * inner * before**2 + 9 * inner**2 * size**2 + inner * outputs * size**2
            total += 0 if block else inputs * outputs * size**2  # the projection of a stage's first block
            inputs = outputs
    return total + 100 * inputs


def sub_network(width: float) -> float:
    """The mean over GradAug's resolutions."""
    return sum(resnet56(width, size) for size in SIZES) / len(SIZES)


# ---- operations ----


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedavg", 87.238),
        ("fedprox", 87.238),
        ("mixup", 87.238),
        ("fedalign", 89.105),
        ("sam+fedalign", 178.210),
    ],
)
def test_operations_of_a_local_step(method: str, expected: float) -> None:
    """FedAlign: one pass of 87.238 M, and 1.868 M for the last stage at a quarter of its width."""
    assert cost(method).macs / 1e6 == pytest.approx(expected, abs=0.0011)


def test_the_counts_are_those_of_the_layers() -> None:
    """The last stage at a quarter has 32 channels of 16×16 in, 64 of 8×8 out; MOON adds two linear layers of 256."""
    assert cost("fedavg").macs == resnet56()
    first = 32 * 16 * 256 + 9 * 16 * 16 * 64 + 16 * 64 * 64 + 32 * 64 * 64
    others = 5 * (64 * 16 * 64 + 9 * 16 * 16 * 64 + 16 * 64 * 64)
    assert cost("fedalign").macs == resnet56() + first + others
    assert round((first + others) / 1e6, 3) == 1.868
    assert cost("moon", MOON).macs == 3 * (resnet56() + 2 * 256**2)
    assert round(cost("moon", MOON).macs / 1e6, 1) == 262.1


@pytest.mark.parametrize(("method", "passes"), [("fedsol", 3), ("fedsol(rho=0.0)", 1), ("fedntd", 2), ("apfl", 2)])
def test_a_step_after_the_first_counts(method: str, passes: int) -> None:
    """FedSOL's first step of a round is plain; then come a frozen pass and two for gradients."""
    assert cost(method).macs == passes * resnet56()


def test_what_later_steps_do_more_is_added_to_what_is_random() -> None:
    assert cost("fedsol+stochdepth").macs == pytest.approx(3 * cost("stochdepth").macs)
    more = cost("fedsol+gradaug(n=1)").macs - cost("gradaug(n=1)").macs
    assert more == pytest.approx(2 * resnet56())


@pytest.mark.parametrize(("rule", "expected"), [("paper", 82.89), ("code", 83.12)])
def test_stochastic_depth_has_its_expected_number(rule: str, expected: float) -> None:
    assert round(cost(f"stochdepth(rule='{rule}')").macs / 1e6, 2) == expected


def test_gradaugs_passes_count_at_their_widths_and_resolutions() -> None:
    """One sub-network of the least width: 127.6 M in all."""
    found = cost("gradaug(n=1)").macs
    assert found == pytest.approx(resnet56() + sub_network(0.8), rel=1e-9)
    assert round(found / 1e6, 1) == 127.6


def test_gradaugs_random_widths_count_with_their_law() -> None:
    """A second one has a width from U(0.8, 1); channel numbers are constant between the widths where one jumps."""
    jumps = {jump for c in (16, 32, 64, 128, 256) for k in range(1, 40) for jump in ((8 * k - 4) / c, 8 * k / 0.9 / c)}
    widths = sorted({0.8, 1.0} | {width for width in jumps if 0.8 < width < 1})
    mean = sum((high - low) * sub_network((low + high) / 2) for low, high in pairwise(widths)) / 0.2
    assert cost("gradaug(n=2)").macs == pytest.approx(resnet56() + sub_network(0.8) + mean, rel=2e-3)


# ---- stored parameters ----


@pytest.mark.parametrize(
    ("method", "model", "models", "weights", "parameters"),
    [
        ("fedavg", "resnet56", 1, 605_460, 614_452),
        ("fedalign", "resnet56", 1, 605_460, 614_452),
        ("gradaug(n=1)", "resnet56", 1, 605_460, 614_452),
        ("stochdepth(rule='paper')", "resnet56", 1, 605_460, 614_452),
        ("mixup", "resnet56", 1, 605_460, 614_452),
        ("fedprox", "resnet56", 2, 1_210_920, 1_228_904),
        ("moon", MOON, 3, 2_211_132, 2_238_108),
        ("ifca(k=2)", "resnet56", 2, 1_210_920, 1_228_904),
        ("ifca(k=4)", "resnet56", 4, 2_421_840, 2_457_808),
    ],
)
def test_stored_parameters_with_and_without_those_of_normalisations(
    method: str, model: str, models: int, weights: int, parameters: int
) -> None:
    """The paper's column counts convolutions and linear layers: 0.61, 1.21 and 2.21 millions."""
    found = cost(method, model)
    assert (found.models, found.weights, found.parameters) == (models, weights, parameters)


# ---- the command ----

SMALL = ["--model", "resnet56(blocks=1, width=4)", "--image", "8", "--classes", "4", "--samples", "4"]
SMALL += ["--batch-size", "2", "--methods", "fedavg,fedprox,fedalign(width=0.5)"]


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Paper 001's table 5: 87.3 and 0.61 for FedAvg, 89.1 and 0.61 for FedAlign, 87.3 and 1.21 for FedProx."""
    monkeypatch.setenv("COLUMNS", "160")
    argv = ["cost", "--rounds", "0", "--batch-size", "2", "--methods", "fedavg,fedprox,fedalign"]
    assert main(argv) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row[1:5] for row in rows if len(row) > 5 and row[0] in ("fedavg", "fedprox", "fedalign")}
    assert table == {
        "fedavg": ["87.2", "87.3", "0.61", "0.61"],
        "fedprox": ["87.2", "87.3", "1.21", "1.21"],
        "fedalign": ["89.1", "89.1", "0.61", "0.61"],
    }


def test_a_small_network_costs_something(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logistic regression of 3×8×8 inputs in 4 classes: 192 · 4 products, and as many weights with 4 biases."""
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["cost", "--rounds", "0", "--model", "logistic", "--methods", "fedavg", *SMALL[2:10]]) == 0
    out, err = capsys.readouterr()
    figures = next(line.split()[1:6] for line in out.splitlines() if " MB " in line)
    assert figures == ["0.000768", "–", "0.000772", "–", "0.000772"]
    assert "fedavg: 768 operations per sample" in err


def test_the_command_prints_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--rounds", "1", "--json", *SMALL]) == 0
    table = json.loads(capsys.readouterr().out)
    rows = next(value for value in table.values() if isinstance(value, list))
    assert [row["method"] for row in rows] == ["fedavg", "fedprox", "fedalign(width=0.5)"]
    assert [row["models"] for row in rows] == [1, 2, 1]
    assert all(row["seconds"] > 0 for row in rows) and rows[0]["ratio"] == 1
    assert main(["cost", "--rounds", "0", "--csv", *SMALL]) == 0
    again = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["macs"]) for row in again] == [row["macs"] for row in rows]


def test_there_are_as_many_clients_as_a_method_needs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["cost", "--rounds", "1", "--json", *SMALL[:-1], "ifca(k=3),attack(clients=4)"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    assert [(row["method"], row["models"]) for row in rows] == [
        ("fedavg", 1),
        ("ifca(k=3)", 3),
        ("attack(clients=4)", 1),
    ]
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--methods", "fedavg,fedalgn"], "fedalign"),
        (["--model", "resnet65"], "resnet56"),
        (["--rounds", "-1"], "rounds"),
        (["--classes", "0"], "classes"),
        (["--model", "mlp", "--methods", "stochdepth"], "stochdepth"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(["cost", "--rounds", "0", *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fedflat: error: ") and said in error
