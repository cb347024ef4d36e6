"""Runs beside each other: figures by hand, significance by published tables, and what the tables look like."""

from __future__ import annotations

import csv
import io
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import fedflat
from fedflat import Comparison, Experiment
from fedflat.cli import main
from fedflat.errors import InputError
from fedflat.report.compare import compare
from fedflat.report.significance import compared, incomplete_beta, paired, two_sided, welch
from fedflat.report.tabular import in_html, in_latex, latex, markdown
from fedflat.runs.records import Record, grouped, record_of

DIGITS: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet_equal(delta=0.3)",
    "clients": 6,
    "participation": "uniform(3)",
    "model": "logistic",
    "rounds": 4,
    "local_epochs": 1,
    "local_holdout": 0.2,
    "backend": "serial",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds each, and one without a common model."""
    root = tmp_path_factory.mktemp("runs")
    for method, seed in [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedavg", 2),
        ("sam", 0),
        ("sam", 1),
        ("sam", 2),
        ("fedrep", 0),
    ]:
        fedflat.run(Experiment(**DIGITS, method=method, seed=seed), out=root / f"{method}-s{seed}", progress=False)
    return root


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def record(values: list[float | None], rounds: int | None = None, metric: str = "accuracy", **fields: Any) -> Record:
    """A run with these values of a metric, one a round, at a cost that is easily added up."""
    cost = {"clients": 10, "left_out": 2, "floats_up": 7, "floats_down": 5, "steps": 100, "seconds": 0.5}
    rows = [{"round": t, "accuracy": None, metric: value, **cost} for t, value in enumerate(values, start=1)]
    return Record(Experiment(rounds=rounds or len(values), **fields), rows)


def seeds(*curves: list[float | None], **fields: Any) -> list[Record]:
    return [record(curve, seed=seed, **fields) for seed, curve in enumerate(curves)]


# ---- Student's t ----


@pytest.mark.parametrize(
    ("quantile", "freedom", "p"),
    [  # two-sided, as in any printed table
        (12.706, 1, 0.05),
        (63.657, 1, 0.01),
        (4.303, 2, 0.05),
        (9.925, 2, 0.01),
        (2.776, 4, 0.05),
        (8.610, 4, 0.001),
        (2.228, 10, 0.05),
        (3.169, 10, 0.01),
        (2.042, 30, 0.05),
        (1.671, 60, 0.10),
        (1.960, 1e9, 0.05),
    ],
)
def test_quantiles_of_the_printed_tables(quantile: float, freedom: float, p: float) -> None:
    assert two_sided(quantile, freedom) == pytest.approx(p, rel=1e-3)
    assert two_sided(-quantile, freedom) == two_sided(quantile, freedom)


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 2.5, 40.0, 1e6])
def test_closed_forms_of_one_two_and_four_degrees_of_freedom(t: float) -> None:
    assert two_sided(t, 1) == pytest.approx(2 / math.pi * math.atan2(1, t), rel=1e-12)
    root = math.sqrt(2 + t * t)
    assert two_sided(t, 2) == pytest.approx(2 / (root * (root + t)), rel=1e-12)
    share = t / math.sqrt(4 + t * t)
    assert two_sided(t, 4) == pytest.approx(1 - share * (1.5 - 0.5 * share**2), abs=1e-14)


def test_identities_of_the_incomplete_beta_function() -> None:
    for a, b, x in [(0.5, 0.5, 0.2), (2.5, 1.5, 0.7), (30.0, 0.5, 0.97), (1.0, 7.0, 0.01)]:
        assert incomplete_beta(a, b, x) + incomplete_beta(b, a, 1 - x) == pytest.approx(1, abs=1e-14)
    assert incomplete_beta(1, 3, 0.3) == pytest.approx(1 - 0.7**3)
    assert incomplete_beta(4, 1, 0.3) == pytest.approx(0.3**4)
    assert incomplete_beta(0.5, 0.5, 0.25) == pytest.approx(2 / math.pi * math.asin(0.5))
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


def test_students_own_example() -> None:
    """Hours of sleep gained by ten patients with two drugs (Student, 1908): t = 4.06, p = 0.0028 pair by pair."""
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    pairs, groups = paired(two, one), welch(two, one)
    assert (pairs.statistic, pairs.freedom, pairs.p) == pytest.approx((4.0621, 9, 0.002833), rel=1e-3)
    assert (groups.statistic, groups.freedom, groups.p) == pytest.approx((1.8608, 17.776, 0.07939), rel=1e-3)


def test_equal_groups_and_groups_without_spread() -> None:
    assert paired([1, 2, 3], [1, 2, 3]).p == welch([1, 2, 3], [3, 1, 2]).p == 1
    assert paired([2, 3, 4], [1, 2, 3]).p == welch([1, 1, 1], [2, 2, 2]).p == 0
    assert welch([1, 2, 3], [5, 7, 8, 9]).p == welch([5, 7, 8, 9], [1, 2, 3]).p


def test_pairs_where_seeds_are_common_and_else_welch() -> None:
    one, other = {0: 0.5, 1: 0.6, 2: 0.65}, {0: 0.4, 1: 0.52, 2: 0.58}
    assert compared(one, other) == paired(list(one.values()), list(other.values()))
    later = {seed + 2: value for seed, value in other.items()}
    assert compared(one, later) == welch(list(one.values()), list(other.values()))
    assert compared(one, {0: 0.4, 1: 0.5}) is None


def test_p_is_uniform_where_nothing_differs() -> None:
    draws = random.Random(7)
    found = [welch([draws.gauss(0, 1) for _ in range(3)], [draws.gauss(0, 1) for _ in range(5)]).p for _ in range(2000)]
    assert sum(p < 0.5 for p in found) / 2000 == pytest.approx(0.5, abs=0.05)
    assert sum(p < 0.05 for p in found) / 2000 == pytest.approx(0.05, abs=0.02)


# ---- rows ----


def test_groups_are_runs_that_differ_in_the_seed_only() -> None:
    records = [*seeds([0.5], [0.6]), *seeds([0.5], [0.6], lr=0.2), *seeds([0.5], method="fedprox", workers=1)]
    assert {label: len(group) for label, group in grouped(records).items()} == {
        "fedavg, lr=0.1": 2,
        "fedavg, lr=0.2": 2,
        "fedprox, lr=0.1": 1,
    }
    assert {label: len(group) for label, group in grouped(records, ["method"]).items()} == {"fedavg": 4, "fedprox": 1}
    assert list(grouped(records, ["lr", "method"])) == ["lr=0.1, fedavg", "lr=0.2, fedavg", "lr=0.1, fedprox"]


def test_means_deviations_and_costs_by_hand() -> None:
    runs = seeds([0.1, 0.9, 0.5], [0.2, 0.4, 0.7])
    (row,) = compare(runs).rows
    assert (row["last"], row["best"], row["tail"]) == pytest.approx((0.6, 0.8, 0.6))
    assert (row["last_std"], row["best_std"]) == pytest.approx((0.1 * math.sqrt(2), 0.1 * math.sqrt(2)))
    assert (row["floats_up"], row["floats_down"], row["steps"], row["seconds"]) == (210, 180, 300, 1.5)
    assert compare(runs[:1]).rows[0]["last_std"] is None


def test_of_a_loss_the_lowest_is_best_and_targets_lie_below() -> None:
    (row,) = compare([record([2.0, 1.0, 0.5, 1.5], metric="loss")], metric="loss", targets=[1.0]).rows
    assert (row["last"], row["best"], row["to_1"]) == (1.5, 0.5, 2)


def test_rounds_to_a_target_per_run_and_on_the_mean_curve() -> None:
    """The mean of curves that peak at different times may never reach what each of them does."""
    runs = seeds([None, 0.5, None, 0.2], [None, 0.1, None, 0.6])
    found = compare(runs, targets=[0.5, 0.4, 0.3, 0.9])
    (row,) = found.rows
    assert (row["to_0.5"], row["to_0.5_runs"]) == (None, [2, 4])
    assert (row["to_0.4"], row["to_0.3"]) == (4, 2)
    assert row["to_0.9_runs"] == [None, None]
    cells = found.markdown().splitlines()[2].split(" | ")
    assert cells[5:9] == ["4+ (2, 4)", "4 (2, 4)", "2 (2, 4)", "4+ (4+, 4+)"]


def test_of_many_runs_the_extremes_are_shown() -> None:
    runs = seeds(*([0.0] * late + [0.5] * (9 - late) for late in (4, 1, 9, 3, 2, 6, 5, 7)))
    cells = compare(runs, targets=[0.5]).markdown().splitlines()[2].split(" | ")
    assert cells[5] == "9+ (2, …, 9+)"


def test_unfinished_runs_are_marked_and_not_tested() -> None:
    done = seeds([0.5, 0.6], [0.5, 0.7], [0.5, 0.8])
    late = [*seeds([0.1, 0.2], [0.1, 0.3], lr=0.2), record([0.1], rounds=2, lr=0.2, seed=2)]
    found = compare([*done, *late], targets=[0.9])
    assert [row["unfinished"] for row in found.rows] == [0, 1]
    assert (found.rows[1]["p"], found.rows[1]["test"]) == (None, "unfinished")
    assert "fedavg, lr=0.2 (1 of 3 unfinished)" in repr(found) and "1+ (2+, 2+, 1+)" in repr(found)


def test_better_is_only_said_where_chance_is_unlikely() -> None:
    first, better = seeds([0.50], [0.52], [0.51]), seeds([0.60], [0.61], [0.61], lr=0.2)
    noisy = seeds([0.40], [0.90], [0.60], lr=0.3)
    found = compare([*first, *better, *noisy])
    tests = [paired([0.60, 0.61, 0.61], [0.50, 0.52, 0.51]), paired([0.4, 0.9, 0.6], [0.50, 0.52, 0.51])]
    assert [row["p"] for row in found.rows[1:]] == [test.p for test in tests]
    assert tests[0].p < 0.05 < tests[1].p
    assert [row["better"] for row in found.rows] == [None, True, True]
    lines = found.markdown().splitlines()[2:5]
    assert ["better" in line for line in lines] == [False, True, False]
    assert "paired t-test" in found.markdown() and "not corrected" in found.markdown()
    assert "worse" in compare([*better, *first]).markdown()
    losses = [*seeds([1.0], [1.1], [1.05], metric="loss"), *seeds([2.0], [2.1], [2.0], metric="loss", lr=0.2)]
    assert compare(losses, metric="loss").rows[1]["better"] is False


def test_too_few_or_repeated_seeds_are_said() -> None:
    first = seeds([0.5], [0.6], [0.7])
    few = compare([*first, *seeds([0.8], [0.9], lr=0.2)])
    assert few.rows[1]["test"] == "too few seeds" and "at least 3 seeds" in repr(few)
    mixed = compare([*first, *seeds([0.5], [0.6], lr=0.2), *seeds([0.9], [0.8], [0.7], method="sam")], by="method")
    assert mixed.rows[1]["test"] == "repeated seeds"
    assert "| fedavg | 3 (5 runs) |" in mixed.markdown()
    assert "The runs of fedavg differ in lr, too." in mixed.notes


# ---- forms ----

NASTY = "a_b|c*d [x] 5 % & #1 $2 {3} ~4 ^5 \\6 <b>"


def test_latex_escapes_all_that_is_special() -> None:
    text = in_latex(NASTY)
    bare = re.sub(r"\\text[a-z]+\{\}|\$[<>]\$|\\[{}$&#_%]|\{\[\}|\{\*\}", "", text)
    assert not set(bare) & set("\\{}$&#_%~^|*[<>")
    assert in_latex("0.5 ± 0.1, –") == r"0.5 $\pm$ 0.1, --"


def test_latex_has_as_many_cells_as_columns() -> None:
    lines = latex([NASTY, "b"], [[NASTY, "*"], ["[", "d"]], [NASTY]).splitlines()
    inside = lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
    rows = [line for line in inside if line != r"\midrule"]
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [1, 1, 1]
    assert all(row.endswith(r" \\") and row[0] not in "[*" for row in rows)
    assert r"\begin{tabular}{lr}" in lines and inside[1] == r"\midrule"


def test_markdown_has_as_many_cells_as_columns() -> None:
    lines = markdown([NASTY, "b", "c"], [[NASTY, "", "3"]]).splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [4, 4, 4]


def test_html_is_escaped() -> None:
    text = in_html(["<script>", "b"], [['"><img src=x>', "&"]], ["<i>"])
    assert "<script>" not in text and "<img" not in text and "<i>" not in text and "&amp;" in text


def test_csv_has_the_metrics_to_the_bit(folder: Path) -> None:
    found = compare([folder], targets=[0.3])
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [row["runs"] for row in rows] == ["fedavg", "fedrep", "sam"]
    for row in rows:
        records = [record_of(folder / f"{row['runs']}-s{seed}") for seed in row["seeds"].split()]
        metrics = [record.metrics for record in records]
        assert float(row["steps"]) == statistics.fmean(sum(m["steps"] for m in table) for table in metrics)
        last = [table[-1]["accuracy"] for table in metrics]
        if row["runs"] == "fedrep":
            assert row["last"] == row["last_std"] == row["p"] == "" and last == [None]
            assert float(row["low5"]) == metrics[0][-1]["personal_low5"]
            continue
        assert float(row["last"]) == statistics.fmean(last) and float(row["last_std"]) == statistics.stdev(last)
        reached = [next((m["round"] for m in table if m["accuracy"] >= 0.3), math.nan) for table in metrics]
        assert [float(word) for word in row["to_0.3_runs"].split()] == pytest.approx(reached, nan_ok=True)
    assert float(rows[2]["p"]) == found.rows[2]["p"]


def test_methods_without_a_common_model_have_dashes_and_a_hint(folder: Path) -> None:
    found = compare([folder], targets=[0.3])
    (line,) = (line for line in found.markdown().splitlines() if "| fedrep" in line)
    assert line.split(" | ")[2:7] == ["–"] * 5
    assert any("personal_mean" in note for note in found.notes)
    personal = {row["runs"]: row["last"] for row in compare([folder], metric="personal_mean").rows}
    assert personal["fedrep"] == record_of(folder / "fedrep-s0").last("personal_mean")
    common = [record_of(folder / f"fedavg-s{seed}").last("clients_mean") for seed in range(3)]
    assert personal["fedavg"] == statistics.fmean(value for value in common if value is not None)


def test_one_folder_needs_no_list(folder: Path) -> None:
    assert compare(str(folder)).csv() == compare(folder).csv() == compare([folder]).csv()


def test_a_comparison_shows_itself(folder: Path) -> None:
    found = fedflat.compare(sorted(folder.iterdir()), by="method")
    assert isinstance(found, Comparison)
    assert "seeds" in repr(found) and "fedrep" in repr(found)
    assert found._repr_html_().count("<tr>") == 4


# ---- the command ----


@pytest.mark.parametrize("form", ["latex", "markdown", "csv"])
def test_command_prints_what_python_returns(capsys: pytest.CaptureFixture[str], folder: Path, form: str) -> None:
    first = [str(folder / f"sam-s{seed}") for seed in range(3)]
    assert main(["compare", *first, str(folder), "--target", "0.3,0.5", f"--{form}"]) == 0
    found = compare([*first, folder], targets=[0.3, 0.5])
    assert capsys.readouterr().out == getattr(found, form)()
    assert [row["runs"] for row in found.rows] == ["sam", "fedavg", "fedrep"]


@pytest.mark.parametrize("width", [80, 120])
def test_command_stays_within_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["compare", str(folder), "--target", "0.3,0.4,0.5"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    heads = ["seeds", "last", "best", "tail", "p", "to 0.3", "to 0.4", "to 0.5", "lowest 5 %", "up", "down", "time"]
    assert all(re.search(rf"\b{re.escape(head)}(\s|$)", out) for head in heads) and "…" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metric", "acuracy"], "unknown metric 'acuracy': did you mean 'accuracy'?"),
        (["--by", "metod"], "unknown field 'metod': did you mean 'method'?"),
        (["--target", "half"], "--target takes numbers separated by commas, such as 0.5,0.6, not 'half'"),
        (["--csv", "--latex"], "not allowed with argument"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], folder: Path, words: list[str], said: str) -> None:
    assert main(["compare", str(folder), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err


def test_no_runs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no runs to compare"):
        compare([])
    assert main(["compare"]) == 2
    assert "required: RUN" in capsys.readouterr().err
