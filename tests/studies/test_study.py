"""`fedflat analyze` on real run folders: what it writes, that runs are left alone, what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from helpers import network, plain, world

import fedflat
from fedflat import Experiment, InputError, analysis, data
from fedflat.cli import main
from fedflat.report.html import report
from fedflat.studies.run_data import run_data
from fedflat.studies.study import STUDIES, study

DIGITS = Experiment(
    data="digits",
    partition="iid",
    clients=10,
    participation="uniform(3)",
    model="logistic",
    local_epochs=1,
    rounds=2,
    backend="serial",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        fedflat.run(DIGITS.replace(lr=0.05 * (seed + 1)), out=folder / str(seed))
    return [folder / str(seed) for seed in range(3)]


def test_every_analysis_leaves_a_table_and_the_run_as_it_was(runs: list[Path]) -> None:
    before = {path.name: path.read_bytes() for path in runs[0].iterdir() if path.is_file()}
    single = [name for name, each in STUDIES.items() if each.runs == 1]
    found = study(runs[:1], single, samples=40)
    for name in single:
        table = json.loads((runs[0] / "analysis" / f"{name}.json").read_text())
        assert table and found[name]["0"]
    assert {path.name: path.read_bytes() for path in runs[0].iterdir() if path.is_file()} == before
    rows = list(csv.DictReader((runs[0] / "analysis" / "summary.csv").open()))
    assert {row["analysis"] for row in rows} == set(single)
    again = {row["figure"]: float(row["value"]) for row in rows if row["analysis"] == "curvature"}
    assert again == pytest.approx(found["curvature"]["0"])


def test_figures_are_pictures(runs: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    study(runs[:1], ["curvature"], samples=40)
    assert (runs[0] / "analysis" / "curvature.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (runs[0] / "analysis" / "curvature.svg").read_text()


def test_corruptions_of_several_runs(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row per corruption that says how it was made, one figure of all runs, photographs of ice where they lie."""
    pillow = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "CIFAR-10-C" / "frost"
    folder.mkdir(parents=True)
    for number in range(1, 6):
        pillow.new("RGB", (40, 50), (40 * number,) * 3).save(folder / f"frost{number}.png")
    words = ["--what", "corruptions", "--samples", "40", "--workers", "1", "--data-root", str(tmp_path)]
    assert main(["analyze", *map(str, runs[:2]), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    stored = [json.loads((run / "analysis" / "corruptions.json").read_text()) for run in runs[:2]]
    assert stored[0]["faith"]["frost"] == "in law"
    (told,) = [line.split() for line in lines if line.split()[:1] == ["spatter,"]]
    assert told[1] == "approximate"
    assert list(map(float, told[2:])) == pytest.approx([one["by_corruption"]["spatter"] for one in stored], abs=1e-3)
    assert (runs[0] / "analysis" / "corruptions-together.png").read_bytes().startswith(b"\x89PNG")
    page = report(runs[:2], tmp_path / "page.html").read_text()
    assert "Corrupted images" in page and "glass blur" in page


def test_it_is_the_analysis_of_the_evaluated_model_on_the_training_data(runs: list[Path]) -> None:
    found = study(runs[:1], ["curvature"], samples=10**6, write=False)["curvature"]["0"]
    whole = run_data(runs[0], samples=10**6)
    federation = fedflat.load_federation("digits", "iid", 10, 0)
    labels = torch.cat([federation.samples(i).batch(torch.arange(federation.size(i)))[1] for i in range(10)])
    assert torch.equal(whole.train[1].sort().values, labels.sort().values)
    direct = analysis.curvature(fedflat.load_run(runs[0]).model, whole.train, k=5)
    assert found["λ max"] == pytest.approx(float(direct.eigenvalues[0]), rel=1e-6)


def test_clients_that_never_train_have_no_training_data() -> None:
    run = fedflat.run(DIGITS.replace(new_clients=3, local_holdout=0.2))
    sizes = [run._state.setup.federation.size(client) for client in range(7)]
    assert len(run_data(run, samples=10**6).train[1]) == sum(sizes)


def test_runs_of_one_seed_are_looked_at_on_the_same_samples(runs: list[Path]) -> None:
    first, second = (run_data(path, samples=30, seed=4) for path in runs[:2])
    assert torch.equal(first.train[0], second.train[0])


def test_the_ends_of_a_line_between_runs_are_the_runs_models(runs: list[Path]) -> None:
    study(runs[:2], ["interpolation"], samples=50)
    line = json.loads((runs[0] / "analysis" / "interpolation.json").read_text())["loss"]
    for end, path in ((0, runs[0]), (-1, runs[1])):
        one = run_data(path, samples=50)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(one.model(one.train[0]), one.train[1])
        assert line[end] == pytest.approx(float(loss), rel=1e-5)


def test_the_command_compares_runs_and_says_where_the_files_are(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", *map(str, runs[:2]), "--what", "generalisation", "--samples", "40", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "accuracy gap" in out and out.count("/analysis") == 2
    assert main(["analyze", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in STUDIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--what", "curvatur"], "did you mean 'curvature'"),
        (["--what", "plane"], "3 run folders"),
        (["--what", ""], "name at least one analysis: curvature, density"),
        (["--memory", "0"], "memory must be a positive number of GiB"),
        (["--workers", "-1"], "workers must not be negative"),
        (["--samples", "0"], "samples must be 1 or more"),
        (["--what", "corruptions", "--severity", "9"], "severity must be a whole number from 1 to 5, got 9"),
    ],
)
def test_bad_input_has_one_line_and_status_2(
    runs: list[Path], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(runs[0]), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_same_run_twice_spans_no_plane(runs: list[Path]) -> None:
    with pytest.raises(InputError, match="span no plane"):
        study([runs[0], runs[0], runs[1]], ["plane"], samples=20, write=False)


def doubled(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(output, y)


class Break(fedflat.Callback):
    def round(self, run: fedflat.Run, metrics: object) -> None:
        raise ArithmeticError("no further")


def test_a_run_is_looked_at_with_its_own_loss() -> None:
    run = fedflat.run(DIGITS, loss=doubled)
    found = study([run], ["curvature"], samples=30)["curvature"]["in memory"]
    plain_loss = analysis.curvature(run.model, run_data(run, samples=30).train)
    assert found["λ max"] == pytest.approx(2 * float(plain_loss.eigenvalues[0]), rel=1e-4)


def test_unfinished_runs_and_losses_that_no_folder_holds_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ArithmeticError):
        fedflat.run(DIGITS, loss=doubled, callbacks=[Break()], out=tmp_path / "run")
    run_data(tmp_path / "run", samples=20)
    assert "is not finished: the analysis uses its state after round 1 of 2" in caplog.text
    assert "was trained with the loss 'doubled'" in caplog.text


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    fedflat.run(DIGITS, out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint.json").unlink()
    with pytest.raises(InputError, match=r"has no checkpoint yet.*start it again with the same command"):
        study([tmp_path / "run"])


def test_a_run_on_ones_own_data_says_how_to_go_on(tmp_path: Path) -> None:
    fedflat.run(plain(), federation=world(), model=network(), out=tmp_path / "own")
    with pytest.raises(InputError, match=r"--federation MODULE:FUNCTION"):
        study([tmp_path / "own"])
    loaded = fedflat.load_run(tmp_path / "own", model=network())
    with pytest.raises(InputError, match=r"run_data\(run, federation=…\)"):
        study([loaded])
    assert run_data(loaded, federation=world()).train[0].shape == (30, 4)


def test_runs_of_different_seeds_share_one_data_set_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = data.build
    monkeypatch.setattr(data, "build", lambda kind, *rest: read.append(kind) or real(kind, *rest))
    for seed in range(3):
        fedflat.run(DIGITS.replace(seed=seed), out=tmp_path / str(seed))
    read.clear()
    study([tmp_path / str(seed) for seed in range(3)], ["generalisation"], samples=50, write=False)
    assert read.count("data set") == 1


def test_a_clients_own_model_is_looked_at_on_its_own_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e = DIGITS.replace(method="ditto(lam=0.1)", partition="pathological(labels=2)", lr=0.1)
    run = fedflat.run(e, out=tmp_path / "ditto")
    client = run.clients[0]["client"]
    words = ["analyze", str(tmp_path / "ditto"), "--what", "line", "--samples", "30"]
    assert main([*words, "--client", str(client)]) == 0
    found = json.loads((tmp_path / "ditto" / "analysis" / f"client-{client}" / "line.json").read_text())
    samples = data.load_federation("digits", e.partition, e.clients, e.seed).samples(client)
    assert found["samples"] == 30 and len(samples) >= 30
    assert not (tmp_path / "ditto" / "analysis" / "line.json").exists()
    capsys.readouterr()
    assert main([*words, "--client", "10"]) == 2 and "no client 10" in capsys.readouterr().err
    fedflat.run(DIGITS, out=tmp_path / "plain")
    assert main(["analyze", str(tmp_path / "plain"), "--what", "line", "--client", "1"]) == 2
    assert "keeps no personal model" in capsys.readouterr().err
