"""What a run shows of itself: columns, curves, pictures, a card for notebooks, a report."""

from __future__ import annotations

import math
from base64 import b64decode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import fedflat
from fedflat import Experiment, Run
from fedflat.errors import InputError
from fedflat.report.notebook import summary
from fedflat.runs.records import Record, columns

DIGITS: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "clients": 6,
    "participation": "uniform(3)",
    "model": "logistic",
    "rounds": 5,
    "local_epochs": 1,
    "local_holdout": 0.2,
    "evaluate_every": 2,
    "backend": "serial",
}


@pytest.fixture(scope="module")
def common() -> Run:
    return fedflat.run(Experiment(**DIGITS), progress=False)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A method that leaves part of the model with the clients, read back from its folder."""
    out = tmp_path_factory.mktemp("run") / "split"
    fedflat.run(Experiment(**DIGITS, method="fedrep"), out=out, progress=False)
    return fedflat.load_run(out)


def test_tables_have_the_rows_as_columns(common: Run, split: Run) -> None:
    for run in (common, split):
        for name in ("metrics", "clients", "evaluations"):
            rows, table = getattr(run, name), run.table(name)
            assert rows and set(table) == {key for row in rows for key in row}
            for key, column in table.items():
                wanted = [math.nan if row.get(key) is None else row[key] for row in rows]
                assert np.array_equal(column, np.array(wanted, dtype=float), equal_nan=True), key
    assert common.table()["round"].dtype == int and common.table("evaluations")["new"].dtype == bool


def test_columns_take_rows_of_different_names() -> None:
    found = columns([{"a": 1}, {"a": 2, "b": 0.5}])
    assert found["a"].tolist() == [1, 2] and np.isnan(found["b"][0]) and found["b"][1] == 0.5
    assert columns([]) == {}


def test_curve_has_the_evaluated_rounds(common: Run, split: Run) -> None:
    rounds, values = common.curve()
    assert rounds.tolist() == [2, 4, 5]
    assert values.tolist() == [common.metrics[t - 1]["accuracy"] for t in (2, 4, 5)]
    assert [len(array) for array in split.curve()] == [0, 0]
    assert split.curve("personal_mean")[0].tolist() == [5]


def test_unknown_names_come_with_the_nearest(common: Run) -> None:
    with pytest.raises(InputError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        common.curve("acuracy")
    with pytest.raises(InputError, match="unknown table 'client': did you mean 'clients'"):
        common.table("client")


def test_plot_draws_what_was_measured(common: Run, split: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = common.plot(tmp_path / "curves.svg")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["accuracy", "loss"]
    (line,) = figure.axes[0].lines
    assert np.array_equal(line.get_xydata(), np.column_stack(common.curve()))
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
    other = split.plot()
    assert [axes.get_title(loc="left") for axes in other.axes] == ["personal mean", "train loss"]
    assert other.axes[0].lines[0].get_marker() == "o"  # a line of one point would be invisible


def test_plot_is_shown_by_notebooks_without_pyplot(common: Run) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert common.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert pyplot.get_fignums() == []


def test_card_is_well_formed_and_says_what_came_out(common: Run, split: Run) -> None:
    pytest.importorskip("matplotlib")
    for run, facts in ((common, ["final accuracy", "final loss"]), (split, ["own models"])):
        card = ElementTree.fromstring(f"<div>{run._repr_html_()}</div>")
        told = " ".join(card.itertext())
        assert all(fact in told for fact in facts) and run.experiment.method in told and "5 of 5" in told
        (picture,) = card.findall("img")
        assert b64decode(picture.attrib["src"].partition(",")[2]).startswith(b"\x89PNG")


def test_card_escapes_what_others_wrote() -> None:
    rows: list[dict[str, Any]] = [{"round": 1, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0}]
    run = Record(Experiment(method="<script>alert(1)</script>", data="a&b"), rows, Path("<img src=x>"))
    text = summary(run)
    assert "<script" not in text and "<img src=x" not in text and "a&amp;b" in text


def test_card_of_a_run_without_rounds_has_no_curves() -> None:
    assert "<img" not in summary(Record(Experiment(), []))


def test_report_is_one_file(common: Run, tmp_path: Path) -> None:
    path = common.report(tmp_path / "report.html")
    assert path == tmp_path / "report.html" and "fedavg" in path.read_text()
