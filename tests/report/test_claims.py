"""Tables of flatness, and claims that are stated before they are tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedflat import analysis, load_run
from fedflat.cli import main
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.report.paper_table import load_table
from fedflat.report.quantities import measured, shown
from fedflat.runs.records import Record
from fedflat.studies.run_data import run_data

BASE = (
    'data = "digits", partition = "iid", clients = 6, participation = "uniform(3)", model = "logistic", rounds = 4, '
    'local_epochs = 1, backend = "serial"'
)
TABLE = """
title = "Training helps"
source = "nowhere"
samples = 60

[columns]
"accuracy" = { BASE }
"λ max" = { BASE, quantity = "lambda_max()" }
"H_D" = { BASE, quantity = "h_d()" }

[rows]
"trained" = { lr = 0.1 }
"untrained" = { lr = 0.0 }

[figures]
"trained" = ["–", "–", "–"]
"untrained" = ["50.00", "", ""]

[[claims]]
says = "Training raises accuracy"
row = "trained"
than = "untrained"
columns = ["accuracy"]

[[claims]]
says = "Training lowers accuracy"
row = "trained"
than = "untrained"
lower = true
columns = ["accuracy"]

[[claims]]
says = "Nothing beats itself"
row = "trained"
than = "trained"
columns = ["accuracy"]
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flat.toml").write_text(TABLE.replace("BASE", BASE))


def test_claims_get_a_verdict_and_curvature_is_that_of_the_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "flat.toml", "--seeds", "0..2", "--out", "runs"]) == 0
    written = json.loads(Path("runs/table.json").read_text())
    assert [claim["verdict"] for claim in written["claims"]] == ["confirmed", "contradicted", "not decidable"]
    assert "confirmed" in Path("runs/table.md").read_text() and "confirmed" in capsys.readouterr().out
    cells = {(cell["row"], cell["column"]): cell for cell in written["cells"]}
    tops = []
    for name in cells["trained", "λ max"]["folders"]:
        data = run_data(load_run(Path("runs", name)), samples=60)
        tops.append(float(analysis.curvature(data.model, data.train, k=5, trace=False).eigenvalues[0]))
    assert cells["trained", "λ max"]["mean"] == pytest.approx(sum(tops) / 3, rel=1e-3)
    assert 0 < cells["trained", "H_D"]["mean"] <= 1

    made = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/analysis/*.json")}
    assert len(made) == 6
    assert main(["reproduce", "flat.toml", "--seeds", "0..2", "--out", "runs"]) == 0
    assert made == {path: path.stat().st_mtime_ns for path in made}  # what is there is not made again


def test_one_seed_decides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("flat.toml").write_text(TABLE.replace("BASE", BASE).replace('["–", "–", "–"]', '["–", "", ""]'))
    assert main(["reproduce", "flat.toml", "--seeds", "0", "--out", "runs"]) == 0
    claims = json.loads(Path("runs/table.json").read_text())["claims"]
    assert {claim["verdict"] for claim in claims} == {"not decidable"}
    assert {claim["p"] for claim in claims} == {"too few seeds"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('than = "untrained"', 'than = "untraind"', "did you mean 'untrained'"),
        ('columns = ["accuracy"]', 'columns = ["acuracy"]', "did you mean 'accuracy'"),
        ('says = "Training raises accuracy"', "", "a claim needs 'says'"),
        ("lower = true", "lowr = true", "did you mean 'lower'"),
    ],
)
def test_a_claim_that_does_not_fit_the_table_is_refused(old: str, new: str, message: str) -> None:
    Path("flat.toml").write_text(TABLE.replace("BASE", BASE).replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_table("flat.toml")


def test_a_metric_at_equal_training_loss_is_that_of_the_first_round_that_reaches_it() -> None:
    rows = [{"round": t, "train": 4.0 - t, "top": 10.0 * t} for t in range(1, 4)]
    record = Record(Experiment(rounds=3), rows)
    assert measured("at(metric='top', watched='train', below=2.5)", record) == 20.0
    assert measured("at(metric='top', watched='train', below=0.5)", record) is None
    assert measured("lambda_max()", record) is None
    assert shown("trace()", 8743.6, 12.3, 3) == "8744 ± 12.3"
