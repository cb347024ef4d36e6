"""Comparing over settings: the baseline of the same setting, Holm's correction, ranks and the critical difference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedflat import Experiment
from fedflat.errors import InputError
from fedflat.report.compare import compare
from fedflat.report.pivot import pivot
from fedflat.runs.records import Record

VALUES = {  # method → accuracy in two settings
    "fedavg": {"iid": 0.90, "dirichlet_equal(delta=0.3)": 0.50},
    "sam": {"iid": 0.91, "dirichlet_equal(delta=0.3)": 0.60},
    "man": {"iid": 0.80, "dirichlet_equal(delta=0.3)": 0.55},
}


def record(method: str, partition: str, seed: int) -> Record:
    value = VALUES[method][partition] + 0.001 * seed + 0.0001 * (seed * len(method) % 3)
    zero: dict[str, Any] = {"floats_up": 1, "floats_down": 1, "clients": 1, "left_out": 0, "steps": 1, "seconds": 1.0}
    row = {"round": 1, "accuracy": value, "loss": 1.0} | zero
    return Record(Experiment(method=method, partition=partition, seed=seed, rounds=1), [row])


RUNS = [record(m, p, s) for p in VALUES["fedavg"] for m in VALUES for s in range(3)]


def test_rows_are_tested_against_the_baseline_of_their_own_setting() -> None:
    rows = {row["runs"]: row for row in compare(RUNS).rows}
    for partition in VALUES["fedavg"]:
        assert rows[f"fedavg, partition={partition}"]["p"] is None
        assert rows[f"sam, partition={partition}"]["better"] is True
    assert rows["man, partition=iid"]["better"] is False
    assert rows["man, partition=dirichlet_equal(delta=0.3)"]["better"] is True
    other = {row["runs"]: row for row in compare(RUNS, baseline="fedavg+sam").rows}
    assert other["sam, partition=iid"]["p"] is None and other["fedavg, partition=iid"]["better"] is False
    with pytest.raises(InputError, match=r"unknown method among these runs: 'scaffold'"):
        compare(RUNS, baseline="scaffold")


def test_holms_correction_multiplies_the_smallest_by_their_number() -> None:
    plain, holm = compare(RUNS).rows, compare(RUNS, holm=True).rows
    least = min((row for row in plain if row["p"] is not None), key=lambda row: row["p"])
    same = next(row for row in holm if row["runs"] == least["runs"])
    assert same["p"] == pytest.approx(4 * least["p"])
    assert all(a["p"] is None or b["p"] >= a["p"] for a, b in zip(plain, holm, strict=True))


def test_sorted_rows_begin_with_the_best() -> None:
    tails = [row["tail"] for row in compare(RUNS, ordered=True).rows]
    assert tails == sorted(tails, reverse=True)


def test_a_pivot_marks_the_best_of_every_setting_and_ranks_methods_over_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = pivot(RUNS, ["partition"])
    assert [table.best(setting) for setting in table.settings] == ["sam", "sam"]
    assert table.ranks() == {"fedavg": 2.5, "sam": 1.0, "man": 2.5}
    assert table.critical_difference() == pytest.approx(2.343 * math.sqrt(3 * 4 / (6 * 2)))
    heads, rows = table.filled()
    assert heads == ["accuracy", *VALUES["fedavg"], "rank"] and rows[0][0] == "sam" and rows[0][1].endswith("*")
    assert table.plot(tmp_path / "ranks.svg").read_text().count("<svg") == 1
    assert "sam" in table.markdown() and "sam" in repr(table) and table.csv().count("\n") == 19


def test_fewer_than_two_settings_have_no_critical_difference(tmp_path: Path) -> None:
    table = pivot([run for run in RUNS if run.experiment.partition == "iid"], ["partition"])
    assert table.critical_difference() is None
    with pytest.raises(InputError, match=r"two or more settings"):
        table.plot(tmp_path / "ranks.png")


def test_long_names_are_not_cut_off_in_the_picture_of_ranks(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    worst = "asam(rho=0.7)+fedprox(mu=0.1)+swa(cycle=20)"
    runs = [replace(run, experiment=run.experiment.replace(method=worst)) if run.experiment.method == "fedavg" else run
            for run in RUNS if run.experiment.method != "man"]  # fmt: skip
    picture = image.open(pivot(runs, ["partition"]).plot(tmp_path / "ranks.png")).convert("L")
    for edge in ((0, 0, 3, picture.height), (picture.width - 3, 0, picture.width, picture.height)):
        assert picture.crop(edge).getextrema() == (255, 255)  # white
