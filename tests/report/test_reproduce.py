"""Tables of the papers: what their files hold, and that the cells of a small one run, resume and stand beside it."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedflat.cli import main
from fedflat.core.method import Method
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.parts.swa import SWA
from fedflat.presets import Values
from fedflat.report.claims import judged
from fedflat.report.paper_table import load_table, table_files
from fedflat.report.quantities import measured, shown, summary
from fedflat.report.significance import equivalence
from fedflat.runs.records import Record
from fedflat.runs.series import Member

TINY = """
title = "Two methods on the digits"
source = "nowhere"

[columns]
"iid" = { BASE }
"iid, rounds to 10 %" = { BASE, quantity = "rounds_to(target=0.1)" }
"lr 0" = { BASE, lr = 0.0, quantity = "rounds_to(target=0.99)" }

[rows]
"FedAvg" = { method = "fedavg" }
"FedProx" = { method = "fedprox(mu=0.5)" }

[figures]
"FedAvg" = ["77.77 ± 0.07", "12", "30+"]
"FedProx" = ["66.66 ± 0.06", "13", ""]

[scales.small]
about = "few rounds"
minutes = 1
seeds = 2
changes = { rounds = 3 }

[scales.small.columns]
"iid" = {}
"lr 0" = {}
"""
BASE = (
    'data = "digits", partition = "iid", clients = 8, participation = "uniform(2)", model = "logistic", rounds = 30, '
    'local_epochs = 1, backend = "serial"'
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "tiny.toml").write_text(TINY.replace("BASE", BASE))


# ---- the files ----


@pytest.mark.parametrize("name", table_files())
def test_a_table_is_made_of_experiments_and_figures(name: str) -> None:
    table = load_table(name)
    for scale in ("full", *table.scales):
        cells = table.cells(scale)
        assert cells and all(cell.experiments for cell in cells)
        assert all(re.fullmatch(r"\d+\.\d+( ± \d+\.\d+)?|-?\d+\+?|–", cell.figure) for cell in cells)
    small = table.scales["small"]
    assert small["minutes"] <= 180 and small["about"]
    assert {cell.experiments[0].seed for cell in table.cells("small")} == {0}


@pytest.mark.parametrize(
    ("name", "row", "column", "figure"),
    [
        ("000/table1", "FedDC+MAN", "CIFAR-100, δ = 0.3", "55.21 ± 0.32"),
        ("000/table1", "FedDC", "CIFAR-100, δ = 0.3, rounds to 50 %", "294"),
        ("000/table1", "FedSpeed+MAN", "Tiny-ImageNet, iid", "33.02 ± 0.55"),
        ("000/table5", "FedAvg", "CIFAR-10, δ = 0.3", "80.19 ± 0.46"),
        ("001/table2", "GradAug", "α = 0.1", "48.6 ± 0.4"),
        ("001/table4", "MOON", "C = 64 × 0.25 (100)", "49.5 ± 0.7"),
        ("001/table7", "FedAlign", "ImageNet-200, C = 32 × 0.125 (50)", "55.1 ± 0.5"),
        ("002/table1", "PLGU-LF", "CIFAR-10, C = 10, lowest 5 %", "67.34"),
        ("002/table2", "PLGU-GRep", "CIFAR-10, C = 100, mean", "76.94"),
        ("003/table2", "FedASAM", "CIFAR-10, α = 0, 5 clients", "73.66"),
        ("003/table2", "FedAvg + SWA", "CIFAR-100, α = 0.5, 20 clients", "42.09"),
        ("003/table6", "AdaBest + ASAM", "CIFAR-100, α = 0, 5 clients, w/ SWA", "51.75"),
        ("003/table13", "Adam, lr 0.1", "α = 0", "29.75"),
        ("003/table14", "FedASAM, cyclic lr only", "CIFAR-10, α = 0, 5 clients", "75.07"),
        ("000/table6", "FedSpeed+MAN", "CIFAR-100, δ = 0.6, trace", "3674"),
        ("001/table1", "GradAug", "H_N", "2924"),
        ("003/table1", "FedASAM + SWA", "α = 0, λ max", "24.57"),
        ("003/table17", "FedASAM + Cutout + SWA", "α = 100, 20 clients", "83.11"),
        ("004/table2", "FedDyn", "trace", "-4590"),
        ("004/table4", "SCAFFOLD + const", "λ₁/λ₅", "1.594"),
        ("004/table1", "FedAvg + const", "LeNet-5, cross-device, CIFAR-10 α = 0.5", "54.28"),
        ("004/table1", "FedSAM", "ResNet-18 with BN, cross-silo, CIFAR-100 α = 0.5", "38.43"),
    ],
)
def test_figures_of_the_papers(name: str, row: str, column: str, figure: str) -> None:
    (cell,) = [cell for cell in load_table(name).cells() if (cell.row, cell.column) == (row, column)]
    assert cell.figure == figure


@pytest.mark.parametrize("name", [name for name in table_files() if name.startswith("003")])
def test_swa_begins_at_a_round_that_its_cycle_divides_in_every_table(name: str) -> None:
    table = load_table(name)
    runs = {run for scale in ("full", *table.scales) for cell in table.cells(scale) for run in cell.experiments}
    for run in runs:
        for part in Method.parse(run.method).parts:
            assert not isinstance(part, SWA) or part.first(run.rounds) % part.cycle == 0, run.method


def test_a_scale_that_is_to_decide_states_its_claims_its_reason_and_three_seeds_beforehand() -> None:
    deciding = [table for name in table_files() if (table := load_table(name)).scales["small"].get("claims")]
    assert {table.id.split("/")[0] for table in deciding} == {"000", "001", "002", "003", "004", "flsim"}
    for table in deciding:
        small, cells = table.scales["small"], table.cells("small")
        assert small["why"] and {len(cell.experiments) for cell in cells} == {3}, table.id
        for claim in small["claims"]:  # every claim can be tested with the runs of this scale
            for row in (claim["row"], claim["than"]):
                assert set(claim.get("columns", ())) <= {cell.column for cell in cells if cell.row == row}, table.id
                assert any(cell.row == row for cell in cells), (table.id, row)
        if "pilot" in table.scales:  # its seed is not tested
            assert not {run.seed for cell in table.cells("pilot") for run in cell.experiments} & {0, 1, 2}


@pytest.mark.parametrize("name", table_files())
def test_no_claim_of_a_paper_is_against_the_papers_own_figures(name: str) -> None:
    table = load_table(name)
    for scale in table.scales:
        figures = {(cell.row, cell.column): _number(cell.figure) for cell in table.cells(scale)}
        for claim in table.setting("claims", scale):
            for column in claim.get("columns", dict.fromkeys(column for _, column in figures)):
                gap = _gap(figures, claim, column)
                if "beyond" in claim:
                    gap -= _gap(figures, claim, claim["beyond"])
                if math.isfinite(gap) and "within" not in claim and "either" not in claim:
                    assert gap != 0 and (gap < 0) == claim.get("lower", False), (claim["says"], column)


def _gap(figures: dict[tuple[str, str], float], claim: Values, column: str) -> float:
    one, other = (figures.get((claim[name], column), math.nan) for name in ("row", "than"))
    return one - other


def _number(figure: str) -> float:
    return math.nan if figure == "–" else float(figure.split(" ")[0].removesuffix("+"))


def test_the_reasons_of_a_scale_name_its_own_data_and_cycle() -> None:
    for name in table_files():
        table = load_table(name)
        for title, scale in table.scales.items():
            runs = {run for cell in table.cells(title) for run in cell.experiments}
            said = set(re.findall(r"fifth of (CIFAR-\d+)", scale.get("why", "") + scale["about"]))
            assert not said or said == {run.data.split("(")[0].replace("cifar", "CIFAR-") for run in runs}, name
            parts = [(run.rounds, part) for run in runs for part in Method.parse(run.method).parts]
            swa = {(part.first(rounds), part.cycle, rounds) for rounds, part in parts if isinstance(part, SWA)}
            for told in re.findall(
                r"SWA (\d+) cycles from round ([\d,]+), which its cycle of (\d+)", scale.get("why", "")
            ):
                cycles, first, cycle = (int(number.replace(",", "")) for number in told)
                assert (first, cycle, first + cycles * cycle) in swa, name


def test_one_run_serves_all_its_figures() -> None:
    cells = [cell for cell in load_table("002/table1").cells("small") if cell.row == "FedSAM"]
    assert [cell.quantity for cell in cells] == [f"last(metric='clients_{name}')" for name in ("mean", "low5", "top5")]
    assert len({experiment for cell in cells for experiment in cell.experiments}) == 1


def test_a_table_that_does_not_add_up_is_refused() -> None:
    Path("bad.toml").write_text(TINY.replace("BASE", BASE).replace('"13", ""', '"13"'))
    with pytest.raises(InputError, match="row 'FedProx' needs a figure for each of 3 columns"):
        load_table("bad.toml")
    Path("bad.toml").write_text(TINY.replace("BASE", BASE) + '"lr 1" = {}\n')
    with pytest.raises(InputError, match="unknown column of table bad: 'lr 1': did you mean 'lr 0'"):
        load_table("bad.toml")
    with pytest.raises(InputError, match="unknown scale of table tiny: 'smal': did you mean 'small'"):
        load_table("tiny.toml").cells("smal")
    Path("bad.toml").write_text('title = "x"\n[columns]\n[row]\n')
    with pytest.raises(InputError, match=r"unknown entry of bad\.toml: 'row': did you mean 'rows'"):
        load_table("bad.toml")
    Path("bad.toml").write_text('title = "x"\n[columns]\n[rows]\n')
    with pytest.raises(InputError, match=r"bad\.toml is not a table: it lacks source, figures"):
        load_table("bad.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rounds_to(target=0.1)"', '"nope()"', "column 'iid, rounds to 10 %' of table bad: unknown quantity 'nope'"),
        ('"rounds_to(target=0.1)"', '"rounds_to(target=0.1"', r"table bad: cannot read 'rounds_to\(target=0.1'"),
        ('"rounds_to(target=0.1)"', '"rounds_to(targt=0.1)"', "did you mean 'target'"),
        ('"rounds_to(target=0.1)"', "7", "'quantity' must be text in quotes, got 7"),
        ("seeds = 2", 'quantity = "tail()"', "scale 'small' of table bad: quantity tail: missing a required"),
        ('source = "nowhere"', 'source = "nowhere"\nsamples = "a"', "table bad: 'samples' must be a whole number"),
        ("seeds = 2", "samples = 0", "scale 'small' of table bad: 'samples' must be a whole number from 1 up, got 0"),
        ("seeds = 2", "seeds = []", "'seeds' must be a whole number from 1 up, or a list of seeds"),
        ('about = "few rounds"', "", "scale 'small' of table bad lacks about"),
        ("minutes = 1\n", "", "scale 'small' of table bad lacks minutes"),
        ("minutes = 1\n", 'minutes = "1"\n', "'minutes' must be a number, got '1'"),
        ('"77.77 ± 0.07"', "77.77", "figures of row 'FedAvg' must be a list of texts in quotes"),
        ('["77.77 ± 0.07", "12", "30+"]', '"abc"', "figures of row 'FedAvg' must be a list of texts in quotes"),
        ("[figures]", '[figures]\n"FedAvq" = ["1", "2", "3"]', "unknown row of table bad: 'FedAvq'"),
        ('{ method = "fedavg" }', '"fedavg"', "'rows' must be a table of tables"),
        ('{ method = "fedavg" }', '{ metod = "fedavg" }', "row 'FedAvg' of table bad: 'metod': did you mean 'method'"),
        ("{ rounds = 3 }", "{ runds = 3 }", "changes of scale 'small' of table bad: 'runds': did you mean 'rounds'"),
        ("seeds = 2", 'wach = ["gsnr"]', "entry of scale 'small' of table bad: 'wach': did you mean 'watch'"),
        ("seeds = 2", "claim = []", "entry of scale 'small' of table bad: 'claim': did you mean 'claims'"),
        ("seeds = 2", "claims = [1]", "'claims' must be a list of tables"),
        ("seeds = 2", "claims = [{ CLAIM, lowr = true }]", "entry of a claim of scale .*'lowr': did you mean 'lower'"),
        ("seeds = 2", 'claims = [{ CLAIM, lower = "yes" }]', "'lower' of a claim must be true or false, got 'yes'"),
        ("seeds = 2", "claims = [{ CLAIM, within = 0 }]", "'within' of a claim must be a number above 0, got 0"),
        ("seeds = 2", "claims = [{ CLAIM, either = true, within = 1 }]", "has either 'either' or 'within'"),
        ("seeds = 2", 'claims = [{ CLAIM, beyond = "lr 0" }]', "a claim needs 'columns'"),
        ("seeds = 2", 'claims = [{ CLAIM, columns = ["iid"], beyond = "lr1" }]', "unknown column of scale .*'lr1'"),
        ("seeds = 2", 'rows = { "FedAvg" = {} }\nclaims = [{ CLAIM }]', "unknown row of scale .*'FedProx'"),
    ],
)
def test_a_slip_in_a_table_is_told_when_the_file_is_read(old: str, new: str, message: str) -> None:
    claim = 'says = "FedProx wins", row = "FedProx", than = "FedAvg"'
    assert old in TINY
    Path("bad.toml").write_text(TINY.replace(old, new, 1).replace("CLAIM", claim).replace("BASE", BASE))
    with pytest.raises(InputError, match=message):
        load_table("bad.toml")


# ---- claims ----

UP, NOISY = {0: 3.0, 1: 3.1, 2: 3.2}, {0: 3.0, 1: -3.0, 2: 1.0}
ZERO = {0: 0.0, 1: 0.0, 2: 0.0}


@pytest.mark.parametrize(
    ("form", "one", "other", "verdict"),
    [
        ({}, UP, ZERO, "confirmed"),
        ({}, ZERO, UP, "contradicted"),
        ({}, NOISY, ZERO, "not decidable"),
        ({"lower": True}, ZERO, UP, "confirmed"),
        ({"lower": True}, UP, ZERO, "contradicted"),
        ({"either": True}, UP, ZERO, "confirmed"),
        ({"either": True}, ZERO, UP, "confirmed"),
        ({"either": True}, NOISY, ZERO, "not decidable"),
        ({"within": 4.0}, UP, ZERO, "confirmed"),
        ({"within": 4.0}, ZERO, UP, "confirmed"),
        ({"within": 1.0}, UP, ZERO, "contradicted"),
        ({"within": 1.0}, ZERO, UP, "contradicted"),
        ({"within": 3.1}, UP, ZERO, "not decidable"),
        ({"within": 1.0}, NOISY, ZERO, "not decidable"),  # no significant difference does not mean that there is none
        ({"within": 1.0}, ZERO, ZERO, "confirmed"),
        ({"within": 1.0}, {0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, "not decidable"),
    ],
)
def test_a_verdict_is_that_of_what_the_claim_states(
    form: Values, one: dict[int, float], other: dict[int, float], verdict: str
) -> None:
    assert judged(form, one, other)["verdict"] == verdict


def test_the_p_value_of_an_equivalence_is_students() -> None:
    half = 0.1 / math.sqrt(3)  # the standard error of the three differences
    for margin in (3.0, 3.3, 4.0):  # with two degrees of freedom P(T ≤ t) is ½ + t / (2 √(2 + t²))
        t = (3.1 - margin) / half
        assert equivalence(UP, ZERO, margin) == pytest.approx(0.5 + t / 2 / math.sqrt(2 + t * t))
        assert equivalence(ZERO, UP, margin) == pytest.approx(equivalence(UP, ZERO, margin))


def test_a_claim_is_about_the_seeds_that_both_rows_have() -> None:
    found = judged({}, UP | {7: -100.0}, ZERO)
    assert (found["difference"], found["seeds"], found["verdict"]) == ("+3.1", 3, "confirmed")
    assert judged({}, UP, ZERO | {1: math.inf})["verdict"] == "not decidable"


def test_a_claim_about_two_gains_takes_one_off_the_other() -> None:
    Path("gains.toml").write_text(GAINS.replace("BASE", BASE))
    assert main(["reproduce", "gains.toml", "--scale", "small", "--out", "r"]) == 0
    written = json.loads(Path("r/table.json").read_text())
    mean = {(cell["column"], cell["row"]): cell["mean"] for cell in written["cells"]}
    gains = [mean[column, "six rounds"] - mean[column, "one round"] for column in ("learns", "hardly")]
    more, same, differs = written["claims"]
    assert float(more["difference"]) == pytest.approx(gains[0] - gains[1], rel=1e-3) and more["seeds"] == 3
    assert same["verdict"] == "confirmed" and same["test"] == "two one-sided paired t-tests"
    assert differs["verdict"] == "not decidable"
    assert "p is the larger of two one-sided ones" in Path("r/table.md").read_text()


GAINS = """
title = "More rounds help where something is learnt"
source = "nowhere"

[columns]
"learns" = { BASE }
"hardly" = { BASE, lr = 1e-4 }
"not" = { BASE, lr = 0.0 }

[rows]
"one round" = { rounds = 1 }
"six rounds" = { rounds = 6 }

[figures]
"one round" = ["–", "–", "–"]
"six rounds" = ["–", "–", "–"]

[scales.small]
about = "three seeds"
minutes = 1
seeds = 3

[[scales.small.claims]]
says = "Rounds help more where something is learnt"
row = "six rounds"
than = "one round"
columns = ["learns"]
beyond = "hardly"

[[scales.small.claims]]
says = "Without a learning rate they do not matter"
row = "six rounds"
than = "one round"
columns = ["not"]
within = 0.5

[[scales.small.claims]]
says = "Without a learning rate they matter"
row = "six rounds"
than = "one round"
columns = ["not"]
either = true
"""


# ---- the figures ----


def test_quantities_of_a_curve() -> None:
    rows = [{"round": t, "accuracy": t / 10 if t % 2 == 0 else None} for t in range(1, 9)]
    record = Record(Experiment(rounds=8), rows)
    assert measured("last()", record) == 0.8 and measured("best()", record) == 0.8
    assert measured("tail(rounds=4)", record) == pytest.approx(0.7)
    assert measured("tail(rounds=2, until=4)", record) == pytest.approx(0.4)
    assert measured("rounds_to(target=0.5)", record) == 6
    assert shown("rounds_to(target=0.9)", **summary("rounds_to(target=0.9)", [record]), rounds=8) == "8+"
    other = Record(record.experiment, [{"round": 1, "accuracy": 0.6}])
    assert shown("last()", **summary("last()", [record, other]), rounds=8) == "70.00 ± 14.14"
    assert shown("last()", **summary("last()", []), rounds=8) == "–"
    with pytest.raises(InputError, match="unknown quantity 'lst'"):
        measured("lst()", record)


# ---- running ----


def test_cells_run_and_stand_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "tiny.toml", "--scale", "small", "--out", "r"]) == 0
    out, err = capsys.readouterr()
    assert "scale small: few rounds; about 1 minutes on two cores" in err
    found = json.loads(Path("r/table.json").read_text())["cells"]
    assert [(cell["column"], cell["row"]) for cell in found] == [
        ("iid", "FedAvg"),
        ("iid", "FedProx"),
        ("lr 0", "FedAvg"),
    ]
    first = found[0]
    last = [json.loads((Path("r") / f / "metrics.jsonl").read_text().splitlines()[-1]) for f in first["folders"]]
    assert first["seeds"] == [0, 1] and first["mean"] == pytest.approx(50 * sum(row["accuracy"] for row in last))
    assert found[2]["ours"] == "3+" and found[2]["paper"] == "30+"
    text = Path("r/table.md").read_text()
    assert f"| iid | FedAvg | {first['ours']} | 77.77 ± 0.07 |" in text and "few rounds" in text
    assert "77.77 ± 0.07" in out and first["ours"] in out
    assert main(["show", *map(str, Path("r").glob("*"))]) == 0  # the table's files beside the runs are no mistake


def test_some_rows_and_columns_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--rows", "FedProx", "--columns", "iid, rounds to 10 %; iid"]
    assert main(["reproduce", "tiny.toml", *some, "--list"]) == 0
    shown = capsys.readouterr().out
    assert "FedProx" in shown and "FedAvg" not in shown
    assert "iid, rounds" in shown and "lr 0" not in shown
    for option, given, meant in (("--rows", "FedProx; FedAvq", "FedAvg"), ("--columns", "lr 1", "lr 0")):
        assert main(["reproduce", "tiny.toml", option, given, "--list"]) != 0
        assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_what_is_finished_is_kept_after_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["reproduce", "tiny.toml", "--out", "r"]
    process = subprocess.Popen([sys.executable, "-m", "fedflat", *argv], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(r"fedprox.*: round 1/30", line):
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    cells = load_table("tiny.toml").cells()
    first, second = (_member(cells[place].experiments[0]) for place in (0, 1))
    before = (first.folder / "checkpoint.json").stat().st_mtime_ns
    assert first.finished and not second.finished and not Path("r/table.json").exists()
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert "1 of 3 runs were finished earlier" in err and "2/3 fedprox(mu=0.5)" in err and "2 of 3 runs done" in err
    assert second.finished and (first.folder / "checkpoint.json").stat().st_mtime_ns == before
    assert main(argv) == 0
    assert "round" not in capsys.readouterr().err.replace("rounds", "")


def _member(experiment: Experiment) -> Member:
    from fedflat.runs.series import series

    return series([experiment], "r")[0]


def test_a_failed_cell_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    text = TINY.replace("BASE", BASE).replace("lr = 0.0", 'lr = 1e30, clip = "none", weight_decay = 1.0')
    Path("fails.toml").write_text(text)
    assert main(["reproduce", "fails.toml", "--scale", "small", "--seeds", "0", "--out", "r"]) == 1
    err = capsys.readouterr().err
    assert "failed: r/fedavg-digits-s0-" in err.splitlines()[-1]
    ours = [cell["ours"] for cell in json.loads(Path("r/table.json").read_text())["cells"]]
    assert ours[-1] == "–" and "–" not in ours[:-1]


def test_what_cannot_begin_says_why_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "tiny.toml", "--out", "tiny.toml"]) == 2
    err = capsys.readouterr().err
    assert "tiny.toml cannot hold the runs" in err and "File exists" in err and "choose another with --out" in err
    Path("elsewhere").write_text("")
    assert main(["reproduce", "000/table1", "--data-root", "elsewhere"]) == 2
    err = capsys.readouterr().err
    assert "is not under elsewhere yet: fetching it" in err and "point --data-root or $FEDFLAT_DATA to where" in err
    assert not Path("runs").exists()


def test_tables_and_cells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in table_files()) and "small (about" in out
    assert main(["reproduce", "001/table7", "--list"]) == 0
    out = capsys.readouterr().out
    assert "81.9 ± 0.6" in out and "ImageNet-200, C = 16" in out
    assert main(["reproduce", "003/table20"]) == 2
    assert "unknown table '003/table20': did you mean" in capsys.readouterr().err


def test_losses_are_stated_as_they_are_and_accuracies_in_percent() -> None:
    record = Record(Experiment(), [{"round": 1, "accuracy": 0.5, "loss": 0.25, "clients_low5": 0.125}])
    assert summary("last(metric='loss')", [record])["mean"] == 0.25
    assert summary("last('clients_low5')", [record])["mean"] == 12.5
    assert summary("last()", [record])["mean"] == 50.0
