"""Pictures and terminal charts of runs."""

from __future__ import annotations

import builtins
import math
import struct
from pathlib import Path

import pytest

from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.report.chart import BLANK, Curve, chart, round_step
from fedflat.report.figures import curves, moving_average
from fedflat.runs.records import Record, labels


def record(rounds: int = 60, **fields: object) -> Record:
    """A run whose accuracy rises and whose loss falls."""
    rows = [
        {"round": t, "accuracy": 1 - 1 / (1 + t), "loss": 1 / t + 0.1 * math.sin(t), "seconds": 0.1}
        for t in range(1, rounds + 1)
    ]
    return Record(Experiment(**fields), rows)  # type: ignore[arg-type]


def test_curves_writes_a_png_of_sensible_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = curves([record(), record(lr=0.2)], tmp_path / "new" / "c.png", title="two rates")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1440, 633)
    assert 10_000 < len(content) < 500_000


def test_curves_leaves_pyplot_alone(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    curves([record(rounds=1)], tmp_path / "c.svg")
    assert pyplot.get_fignums() == []


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="no round of these runs has ended"):
        curves([record(rounds=0)], tmp_path / "c.png")


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'fedflat\[report\]'"):
        curves([record()], tmp_path / "c.png")


def test_moving_average_keeps_the_ends_and_the_mean_of_a_line() -> None:
    line = [float(i) for i in range(20)]
    assert moving_average(line, 7) == line
    assert moving_average([0.0, 3.0, 0.0], 3) == [0.0, 1.0, 0.0]
    assert moving_average([], 3) == []


def test_labels_name_what_differs() -> None:
    assert labels([record(method="fedavg"), record(method="fedprox")]) == ["fedavg", "fedprox"]
    assert labels([record(seed=0), record(seed=1, workers=1)]) == ["fedavg, seed=0", "fedavg, seed=1"]
    assert labels([]) == []


def test_tail_is_the_mean_of_the_last_tenth() -> None:
    run = record(rounds=30)
    values = [row["accuracy"] for row in run.metrics[-3:]]
    assert run.tail() == pytest.approx(sum(values) / 3)
    assert run.best() == (30, run.metrics[-1]["accuracy"])
    assert record(rounds=0).tail() is None and record(rounds=0).best() is None


def test_chart_of_a_rising_line_fills_the_diagonal() -> None:
    text = chart([Curve("a", "red", [(0, 0.0), (19, 1.0)])], width=10, height=5).plain.splitlines()
    body = [line[len(line) - len(line.lstrip()) :] for line in text[1:6]]
    columns = [
        [i for i, c in enumerate(line.partition("│")[2] or line.partition("┤")[2]) if ord(c) > BLANK] for line in body
    ]
    assert [min(places) for places in columns] == [8, 6, 4, 2, 0]
    assert body[0].startswith("1 ┤") and body[0].endswith("a") and body[4].startswith("0 ┤")


@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 0.0), (2, 0.0)], [(1, 1e12), (2, -1e12)], [(1, 1e-9), (5, 2e-9)]])
def test_chart_takes_flat_and_extreme_values(points: list[tuple[float, float]]) -> None:
    text = chart([Curve("a", "red", points)], width=20, height=6).plain
    assert any(ord(c) > BLANK for c in text) and " a" in text


def test_chart_of_nothing_says_so() -> None:
    assert "nothing measured yet" in chart([Curve("a", "red", [])], title="loss").plain


def test_round_steps() -> None:
    assert [round_step(x) for x in (0.1, 0.11, 0.21, 2.6, 60)] == pytest.approx([0.1, 0.2, 0.25, 5, 100])
