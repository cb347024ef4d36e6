"""The HTML report of real runs: what the file holds, what it must not hold, and how it is kept up to date."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from report_worlds import Page, analysed, experiment, three_runs

import fedflat
from fedflat.cli import main
from fedflat.data import load_federation
from fedflat.data.picture import KEPT, partition_record
from fedflat.errors import CheckpointError, InputError
from fedflat.report import watch
from fedflat.report.html import report
from fedflat.report.page.page import Page as Draft
from fedflat.report.page.run_groups import POINTS, spread, thinned
from fedflat.report.page.training import chosen_targets
from fedflat.runs.records import Record, grouped, records_of
from fedflat.runs.series import run_all, series
from fedflat.studies.study import study
from fedflat.words import number, percent

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return three_runs(tmp_path_factory.mktemp("runs"))


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


# ---- what is in it ----


def test_the_page_holds_the_figures_of_the_folders(runs: list[Path], tmp_path: Path) -> None:
    page = Page(report(runs, tmp_path / "new" / "r.html", title="A < B"))
    assert [run["accuracy"] for run in page.data["runs"]] == [rows(run)[-1]["accuracy"] for run in runs]
    assert [run["loss"] for run in page.data["runs"]] == [rows(run)[-1]["loss"] for run in runs]
    assert "A < B" in page.text
    watched = ["watched", "interference"]
    assert page.sections == ["summary", "methods", "partition", "curves", "targets", "clients", *watched, "costs"]


def test_runs_that_differ_by_seed_are_one_line_with_their_range(runs: list[Path], tmp_path: Path) -> None:
    page = Page(report(runs, tmp_path / "r.html"))
    both, single = page.plot("Accuracy on the common test set")["series"]
    assert (both["name"], single["name"]) == ("fedavg", "sam")
    first, second = (rows(run)[-1]["accuracy"] for run in runs[:2])
    assert both["y"][-1] == pytest.approx((first + second) / 2, rel=1e-4)
    assert (both["low"][-1], both["high"][-1]) == pytest.approx(sorted((first, second)), rel=1e-4)
    assert single["y"][-1] == pytest.approx(rows(runs[2])[-1]["accuracy"], rel=1e-4)
    assert "low" not in single
    assert {name: len(records) for name, records in grouped(records_of(runs)).items()} == {
        "fedavg": 2,
        "sam": 1,
    }


def test_a_folder_of_runs_stands_for_all_and_runs_in_memory_are_taken_too(runs: list[Path], tmp_path: Path) -> None:
    names = [run["label"] for run in Page(report([runs[0].parent], tmp_path / "a.html")).data["runs"]]
    assert names == ["fedavg, seed=0", "fedavg, seed=1", "sam, seed=0"]
    memory = fedflat.run(experiment(rounds=2, evaluate_clients=None))
    page = Page(report([memory], tmp_path / "b.html"))
    assert page.data["runs"][0]["accuracy"] == memory.metrics[-1]["accuracy"]
    assert page.sections == ["summary", "methods", "curves", "targets", "costs"]


def test_parts_are_told_with_their_formulas(runs: list[Path], tmp_path: Path) -> None:
    page = Page(report(runs, tmp_path / "r.html"))
    for part in fedflat.Method.parse("fedavg+sam").parts:
        assert (type(part).__doc__ or "").splitlines()[0] in page.text
    assert "rho = 0.05" in page.text and page.count("article") == 2


def test_every_analysis_there_is_gets_its_section(runs: list[Path], tmp_path: Path) -> None:
    own = [copied(run, tmp_path / run.name) for run in runs]
    analysed(own)
    page = Page(report(own, tmp_path / "r.html"))
    pictures = ["flatness", "landscape", "eigenplane", "plane", "interpolation", "line", "noise", "layers"]
    assert set(page.sections) > {*pictures, "generalisation", "calibration", "pruning", "apart"}
    stored = json.loads((own[0] / "analysis" / "landscape.json").read_text())
    shown = page.plot("The loss around each model")["items"][0]
    assert shown["z"] == [[float(f"{value:.5g}") for value in row] for row in stored["loss"]]
    marks = page.plot("Three models in one plane")["items"][0]["marks"]
    assert [mark["name"] for mark in marks] == ["fedavg, seed 0", "fedavg, seed 1", "sam"]
    assert "has the smallest λ max" in page.text


def test_what_analyze_writes_is_what_the_report_reads(runs: list[Path], tmp_path: Path) -> None:
    own = [copied(run, tmp_path / run.name) for run in runs]
    found = study(own[::2], ["interpolation"], samples=20)
    page = Page(report(own, tmp_path / "r.html"))
    drawn = page.plot("fedavg, seed 0 to sam")["series"][0]
    assert min(drawn["y"]) == pytest.approx(found["interpolation"]["run0 / run2"]["loss, lowest"], rel=1e-4)


def test_a_damaged_analysis_is_named(runs: list[Path], tmp_path: Path) -> None:
    own = copied(runs[0], tmp_path / "own")
    (own / "analysis").mkdir()
    (own / "analysis" / "noise.json").write_text('{"ratios": [0, 1], "loss": [1]}')
    with pytest.raises(CheckpointError, match=r"noise\.json is not what `fedflat analyze` writes"):
        report([own], tmp_path / "r.html")


def test_a_method_without_a_common_model_is_judged_by_its_clients(tmp_path: Path) -> None:
    fedflat.run(experiment(method="fedrep", model="mlp", rounds=2, evaluate_clients=1), out=tmp_path / "run")
    page = Page(report([tmp_path / "run"], tmp_path / "r.html"))
    assert page.data["runs"][0]["accuracy"] is None
    assert page.plot("Mean accuracy of the clients’ own models")["series"][0]["x"] == [1, 2]
    assert "mean accuracy of the clients’ own models" in page.text


def test_of_equals_none_is_said_to_be_ahead(tmp_path: Path) -> None:
    """FedProx without its pull is FedAvg, bit for bit."""
    runs = [fedflat.run(experiment(method=method, rounds=2)) for method in ("fedavg", "fedprox(mu=0.0)")]
    text = Page(report(runs, tmp_path / "r.html")).text
    assert ", as does fedprox(mu=0.0)." in text and "and so do the worst-off 5 % of them" in text


def test_clients_are_listed_by_name_with_what_each_reached(tmp_path: Path) -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    hospitals = {"Ulm": (x, y), "Oslo": (x[:6], y[:6])}
    federation = fedflat.Federation(hospitals, client_tests=hospitals)
    e = experiment(clients=2, participation="all", local_holdout=0.0, evaluate_clients=1, data="custom", model="custom")
    run = fedflat.run(e, federation=federation, model=torch.nn.Linear(4, 3), out=tmp_path / "run")
    page = Page(report([tmp_path / "run"], tmp_path / "r.html"))
    _, table = page.text.split("All 2 clients", 1)
    for name, size, row in zip(hospitals, (12, 6), run.evaluations[-2:], strict=True):
        assert f"{name}{size}{percent(row['common'])}" in table


def test_a_small_eigenvalue_is_told_with_its_training_loss_and_without_a_promise(
    runs: list[Path], tmp_path: Path
) -> None:
    own = [copied(run, tmp_path / run.name) for run in runs[::2]]
    study(own, ["curvature"], samples=20)
    text = Page(report(own, tmp_path / "r.html")).text
    for run in own:
        stored = json.loads((run / "analysis" / "curvature.json").read_text())
        loss, largest = number(stored["conditions"]["loss"]), number(stored["eigenvalues"][0])
        assert f"{largest} at a training loss of {loss}" in text
    assert "as a rule generalises better" not in text and "does not mean better generalisation" in text


# ---- what is not in it ----


def test_nothing_is_loaded_from_elsewhere(runs: list[Path], tmp_path: Path) -> None:
    page = Page(report(runs, tmp_path / "r.html"))
    assert "http:" not in page.source and "https:" not in page.source and "@import" not in page.source
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
    assert "default-src 'none'" in page.source


def test_names_and_paths_cannot_become_markup(runs: list[Path], tmp_path: Path) -> None:
    own = copied(runs[0], tmp_path / EVIL.replace("/", ""))
    text = (own / "experiment.toml").read_text()
    (own / "experiment.toml").write_text(text.replace('method = "fedavg"', f'method = "fedavg{EVIL}"'))
    shutil.copytree(own, tmp_path / "other")
    page = Page(report([own, tmp_path / "other"], tmp_path / "r.html", title=EVIL))
    assert page.count("img") == 0 and page.count("script") == 2
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert f"fedavg{EVIL}" in page.text and EVIL not in page.source
    assert f"fedavg{EVIL}" in page.plot("Accuracy")["series"][0]["name"]


def test_neither_torch_nor_matplotlib_is_needed_for_folders(runs: list[Path], tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; from fedflat.report.html import report; "
        f"report({[str(run) for run in runs]!r}, {str(tmp_path / 'r.html')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "curves" in Page(tmp_path / "r.html").sections


def test_six_long_runs_make_a_small_file(tmp_path: Path) -> None:
    long = [
        {"round": t, "accuracy": 1 - 1 / (t + 1.23456789), "loss": 2 / t, "train_loss": 2 / t, "seconds": 1.23456}
        | {"clients": 100, "left_out": 0, "steps": 500, "floats_up": 10**6, "floats_down": 10**6}
        for t in range(1, 2001)
    ]
    people = [
        {"round": t, "client": k, "new": False, "samples": 9, "common": (t * k % 97) / 97, "personal": None}
        for t in range(200, 2001, 200)
        for k in range(300)
    ]
    records = [
        Record(experiment(method=method, seed=seed, rounds=2000), long, evaluations=people)
        for method in ("fedavg", "fedprox", "scaffold")
        for seed in (0, 1)
    ]
    path = report(records, tmp_path / "r.html")
    assert path.stat().st_size < 1_000_000
    assert all(len(line["x"]) <= POINTS for line in Page(path).plot("Accuracy")["series"])


# ---- numbers ----


def test_the_spread_is_over_the_rounds_that_all_runs_have() -> None:
    assert spread([[(1, 1.0), (2, 3.0)], [(2, 5.0), (3, 7.0)]]) == {"x": [2], "y": [4.0], "low": [3.0], "high": [5.0]}
    assert spread([[(1, 1.0)], [(2, 2.0)]]) == {"x": [1], "y": [1.0]}
    assert spread([[], []]) == {}


@pytest.mark.parametrize("count", [1, 2, POINTS, POINTS + 1, 12345])
def test_thinning_keeps_both_ends(count: int) -> None:
    kept = thinned({"x": list(range(count))})["x"]
    assert (kept[0], kept[-1]) == (0, count - 1) and len(kept) <= POINTS


def test_targets_are_reached_by_all_or_by_the_best(runs: list[Path]) -> None:
    draft = Draft(records_of(runs))
    goals = chosen_targets(draft)
    tops = [max(spread([record.points("accuracy") for record in group.records])["y"]) for group in draft.groups]
    assert goals[-1] <= max(tops) < goals[-1] + 0.01
    assert any(goal <= min(tops) < goal + 0.01 for goal in goals)


# ---- who holds what ----


def test_a_run_folder_tells_who_holds_what(runs: list[Path], tmp_path: Path) -> None:
    e = experiment()
    federation = load_federation(e.data, e.partition, e.clients, e.seed, None, e.augment, e.local_holdout)
    held = json.loads((runs[0] / "partition.json").read_text())
    assert held == {"clients": 10, "shown": list(range(10)), "counts": federation.counts().tolist()}
    heat = Page(report(runs, tmp_path / "r.html")).plot("digits, ")
    assert heat["values"] == federation.counts().T.tolist()
    (own := copied(runs[0], tmp_path / "older")).joinpath("partition.json").unlink()
    assert "partition" not in Page(report([own], tmp_path / "r.html")).sections


def test_what_cannot_be_counted_at_a_glance_is_left_out() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 2, 2, -100])
    assert partition_record(fedflat.Federation([(x, y)])) == {"clients": 1, "shown": [0], "counts": [[1, 0, 2]]}
    for targets in (y.float(), y - 1, y + 10**6):
        assert partition_record(fedflat.Federation([(x, y), (x, targets)])) == {}
    assert partition_record(fedflat.Federation([list(zip(x, y, strict=True))])) == {}
    many = partition_record(fedflat.Federation([(x, y)] * 1001))
    assert len(many["shown"]) == len(many["counts"]) == KEPT and many["shown"][-1] == 1000


# ---- the command ----


def test_the_command_says_where_the_report_is(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs[0].parent), "--out", str(tmp_path / "r.html"), "--title", "mine"]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'r.html'}\n"
    assert "<title>mine</title>" in (tmp_path / "r.html").read_text()


def test_what_cannot_be_reported_is_refused_in_one_line(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = copied(runs[0], tmp_path / "begun")
    (begun / "metrics.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    cases = [
        ([str(runs[0].parent / "run9")], r"did you mean"),
        ([str(begun)], f"no round has ended yet in {begun}"),
        ([str(runs[0]), "--out", str(tmp_path / "file" / "r.html")], "cannot be written to"),
        ([str(runs[0]), "--out", str(begun)], "cannot be written to"),
    ]
    for words, said in cases:
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(InputError, match="nothing to report"):
        report([], tmp_path / "r.html")


def test_a_run_without_a_round_waits_outside(runs: list[Path], tmp_path: Path) -> None:
    begun = copied(runs[0], tmp_path / "begun")
    (begun / "metrics.jsonl").write_text("")
    page = Page(report([runs[1], begun], tmp_path / "r.html"))
    assert len(page.data["runs"]) == 1 and "1 more without a finished round" in page.text


# ---- watching ----


def test_a_watched_page_is_renewed_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    path, seen = tmp_path / "r.html", threading.Event()
    pages: list[Page] = []

    class Patient(fedflat.Callback):
        """After the first round it waits until that round was seen."""

        def round(self, run: fedflat.Run, metrics: Any) -> None:
            seen.wait(60)

    def begun(path: Path) -> None:
        pages.append(Page(path))
        seen.set()

    work = {"out": tmp_path / "runs" / "one", "callbacks": [Patient()]}
    thread = threading.Thread(target=fedflat.run, args=[experiment()], kwargs=work)
    (tmp_path / "runs").mkdir()  # there is nothing to show yet
    thread.start()
    try:
        assert watch.follow([tmp_path / "runs"], path, begun) == path
    finally:
        seen.set()
        thread.join()
    assert [page.data["reload"] > 0 for page in (*pages, Page(path))] == [True, False]
    assert pages[0].data["runs"][0]["rounds"] < 4
    assert Page(path).data["runs"][0]["rounds"] == 4
    assert Page(path).data["runs"][0]["accuracy"] == rows(tmp_path / "runs" / "one")[-1]["accuracy"]


def test_a_run_that_a_callback_stopped_has_ended(tmp_path: Path) -> None:
    class Enough(fedflat.Callback):
        def round(self, run: fedflat.Run, metrics: Any) -> str:
            return "enough"

    fedflat.run(experiment(), out=tmp_path / "run", callbacks=[Enough()])
    (record,) = records_of([tmp_path / "run"])
    assert record.unfinished and record.ended


def test_the_page_of_a_grid_waits_for_runs_that_have_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.01)
    path, out = tmp_path / "r.html", tmp_path / "runs"

    def late() -> list[fedflat.Callback]:
        """Before the second run begins, the first has been on the page with all its rounds for many looks."""
        deadline = time.monotonic() + 30
        while (out / one.folder.name).exists() and time.monotonic() < deadline:
            if path.exists() and Page(path).data["runs"][0]["rounds"] == 4:
                time.sleep(0.5)
                break
            time.sleep(0.01)
        return []

    one, other = members = series([experiment(), experiment(seed=1)], out)
    out.mkdir()
    thread = threading.Thread(target=run_all, args=[members], kwargs={"progress": False, "callbacks": late})
    thread.start()
    try:
        watch.follow([out], path, lambda page: None)
    finally:
        thread.join()
    assert [run["folder"] for run in Page(path).data["runs"]] == sorted([str(one.folder), str(other.folder)])


def test_a_run_of_a_grid_that_failed_is_waited_for_no_more(tmp_path: Path) -> None:
    diverging = experiment(lr=1e30, clip=None, weight_decay=1.0)
    bad, good = run_all(series([diverging, experiment()], tmp_path), progress=False)
    records = records_of([tmp_path])
    assert bad.failure and any(record.unfinished for record in records)
    assert watch.to_come([tmp_path], records) == set()
    assert watch.to_come([bad.folder, good.folder], records) == {bad.folder}


def test_ctrl_c_ends_watching_with_a_page_that_waits_for_nothing(runs: list[Path], tmp_path: Path) -> None:
    own = copied(runs[0], tmp_path / "own")
    (own / "experiment.toml").write_text((own / "experiment.toml").read_text().replace("rounds = 4", "rounds = 9"))
    path = tmp_path / "r.html"
    command = [sys.executable, "-m", "fedflat", "report", "--watch", str(own), "--out", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"report: {path}\n"
    assert Page(path).data["reload"] > 0
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "fedflat: interrupted\n")
    assert Page(path).data["reload"] == 0
