"""The leaderboard: the same search for all, tests that agree with the books, failures as rows, runs that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedflat.cli import main
from fedflat.core.method import Method
from fedflat.core.registry import known_parts
from fedflat.errors import InputError
from fedflat.parts.swa import SWA
from fedflat.report.board.page import rank_lines
from fedflat.report.board.plan import load_plan
from fedflat.report.board.standings import Ranking, cliques, critical_difference, studentized_range

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOARD = BENCHMARKS / "leaderboard.toml"
TINY = """
title = "Toy <board>"
seeds = 3
samples = 40

[experiment]
data = "digits(share=0.5)"
clients = 6
participation = "uniform(3)"
model = "logistic"
rounds = 4
local_epochs = 1
backend = "serial"
evaluate_clients = 0

[settings."iid"]
partition = "iid"

[search]
rounds = 2
lr = [0.0, 0.1]

[values]
"fedprox.mu" = [0.0, 10.0]
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("tiny.toml").write_text(TINY)


def test_methods_are_searched_alike_ranked_and_failures_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["leaderboard", "tiny.toml", "--only", "fedprox,fedalign", "--add", "fedavgm(beta=0.3)", "--out", "board"]
    assert main(words) == 1  # fedalign needs a network of stages
    found = json.loads(Path("board/leaderboard.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert set(rows) == {"fedavg", "fedprox", "fedalign", "fedavgm(beta=0.3)"}
    assert rows["fedalign"]["accuracy"] is None and "fedalign" in rows["fedalign"]["failure"]
    assert {rows[name]["lr"] for name in rows if name != "fedalign"} == {0.1}  # a rate of 0 learns nothing
    assert rows["fedprox"]["chosen"] == "fedprox(mu=0.0)" and rows["fedprox"]["accuracy"] == rows["fedavg"]["accuracy"]
    assert rows["fedavg"]["seeds"] == 3 and rows["fedavg"]["rounds_to"] <= 4 and rows["fedavg"]["time"] == 1
    assert rows["fedavg"]["floats"] == 4 * 3 * 2 * 650 and rows["fedavg"]["lambda_max"] > 0
    assert rows["fedavg"]["ratio5"] >= 1  # λ₁/λ₅, from the largest down
    assert found["ranks"]["fedavg"] == found["ranks"]["fedprox"]  # ties share their mean rank
    tested = sorted((row["p"], row["p_holm"]) for row in rows.values() if row["p"] is not None)
    assert len(tested) == 2 and rows["fedprox"]["p_holm"] == 1  # two tests: the smaller p counts twice
    assert tested[0][1] == pytest.approx(min(1.0, 2 * tested[0][0]))
    page = Path("board/leaderboard.html").read_text()
    assert "Toy &lt;board&gt;" in page and "Toy <board>" not in page and page.count("<tr class") == 4
    assert "Not ranked, as results are missing: fedalign" in Path("board/leaderboard.md").read_text()

    made = {path: path.stat().st_mtime_ns for path in Path("board").rglob("checkpoint.json")}
    assert len(made) == 3 * 2 + 1 + 3 * 3  # rates of three methods, one other mu, three seeds
    capsys.readouterr()
    assert main(words) == 1
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_a_board_goes_on_from_the_records_of_another_machine() -> None:
    words = ["leaderboard", "tiny.toml", "--only", "fedprox"]
    assert main([*words, "--out", "there"]) == 0
    for arguments in (["pack", "there", "runs.tar.xz"], ["unpack", "runs.tar.xz", "here"]):
        subprocess.run([sys.executable, BENCHMARKS / "records.py", *arguments], check=True)
    assert not list(Path("here").rglob("*.safetensors"))
    brought = {path: path.stat().st_mtime_ns for path in Path("here").rglob("checkpoint.json")}
    assert main([*words, "--out", "here"]) == 0
    assert brought == {path: path.stat().st_mtime_ns for path in Path("here").rglob("checkpoint.json")}  # none again
    one, other = (json.loads(Path(folder, "leaderboard.json").read_text()) for folder in ("there", "here"))
    assert one == other


def test_the_board_of_the_source_ranks_every_method_with_a_common_model() -> None:
    plan = load_plan(BOARD)
    methods = plan.methods()
    for name in known_parts():
        assert (name in methods) != bool(plan.why_not(name)), name
    assert methods[0] == "fedavg" and "fedlesam_d" in methods and set(plan.combinations) <= set(methods)
    assert all(1 <= len(plan.variants(method)) <= 3 for method in methods)
    assert len(plan.settings) == 3 and plan.seeds == 3 and plan.search_seed not in range(3)
    assert list(plan.within(["MNIST by writer"]).settings) == ["MNIST by writer"] and plan.within([]) == plan
    for name in plan.settings:
        assert "judge='rest'" in plan.searched(name).data and "judge" not in plan.setting(name).data


def test_swa_begins_at_a_round_that_its_cycle_divides_in_the_search_and_in_the_runs_of_the_board() -> None:
    plan = load_plan(BOARD)
    texts = [text for method in plan.methods() for text in plan.variants(method)]
    found = [part for text in texts for part in Method.parse(text).parts if isinstance(part, SWA)]
    assert {(part.start, part.cycle) for part in found} == {(0.25, 5), (0.5, 5), (0.75, 5)}
    for name in plan.settings:
        for rounds in (plan.searched(name).rounds, plan.setting(name).rounds):
            assert [part.first(rounds) % part.cycle for part in found] == [0] * len(found), (name, rounds)


@pytest.mark.parametrize(
    ("method", "variants"),
    [
        ("swa(cycle=5)", ["swa(cycle=5, start=0.25)", "swa(cycle=5, start=0.5)", "swa(cycle=5, start=0.75)"]),
        ("swa(start=0.5, cycle=5)", ["swa(start=0.5, cycle=5)"]),
        ("swa(0.5)", ["swa(0.5)"]),
        ("sam(rho=0.3)+swa(0.5)", ["sam(rho=0.3)+swa(0.5)"]),
        ("stochdepth", ["stochdepth(keep=0.7)", "stochdepth(keep=0.8)", "stochdepth(keep=0.9)"]),
        ("scaffold", ["scaffold"]),
    ],
)
def test_the_main_hyper_parameter_is_searched_unless_the_method_gives_it(method: str, variants: list[str]) -> None:
    assert load_plan(BOARD).variants(method) == variants


def test_a_famous_sum_can_be_left_out() -> None:
    Path("tiny.toml").write_text(TINY + '[leave_out]\nfednsam = "as sam"\n')
    plan = load_plan("tiny.toml")
    assert plan.why_not("fednsam") == "as sam" and "fednsam" not in plan.methods() and "fedgamma" in plan.methods()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[search]", "[serch]", "did you mean 'search'"),
        ("rounds = 2\nlr", "lr", "needs 'rounds'"),
        ('"fedprox.mu"', '"fedprox.nu"', "did you mean 'mu'"),
        ('"fedprox.mu"', '"fedpox.mu"', "did you mean 'fedprox'"),
        ("clients = 6", "client = 6", "did you mean 'clients'"),
        ("seeds = 3", "seeds = 0", "seeds must be 1 or more"),
        ("seeds = 3", "seeds = 1.5", "seeds takes a whole number, such as 3, not 1.5"),
        ("seeds = 3", 'seeds = "3"', "seeds takes a whole number, such as 3, not '3'"),
        ("seeds = 3", "seeds = true", "seeds takes a whole number, such as 3, not True"),
        ("samples = 40", 'samples = "a"', "samples takes a whole number, such as 3, not 'a'"),
        ("samples = 40", "samples = 0", "samples must be 1 or more, not 0"),
        ('title = "Toy <board>"', "title = 3", "title takes a text"),
        ('title = "Toy <board>"', 'combinations = "fedavg+asam"', "combinations takes a list"),
        ('title = "Toy <board>"', "combinations = [3]", "each of the combinations takes a text"),
        ('title = "Toy <board>"', 'combinations = ["asm"]', "combinations: unknown method 'asm': did you mean 'asam'"),
        ('title = "Toy <board>"', "search_seed = 0.5", "search_seed takes a whole number"),
        ('[settings."iid"]', '[settings]\nother = 3\n[settings."iid"]', r'\[settings."other"\] takes a table'),
        ('[settings."iid"]\npartition = "iid"', "[settings]", "needs at least one setting"),
        ('partition = "iid"', 'partition = "idd"', r'\[settings."iid"\] with .*unknown partition .idd.*mean .iid'),
        ('model = "logistic"', 'model = "logistc"', "unknown model 'logistc': did you mean 'logistic'"),
        ("digits(", "digit(", r'\[settings."iid"\] with \[experiment\]: unknown data set .digit.'),
        ("share=0.5", "share=2", r'\[settings."iid"\] with \[experiment\]: share=2 .* at most 1'),
        ("(share=0.5)", "", r'\[settings."iid"\] with \[experiment\]: judge=.rest. .* give a share below 1'),
        ("clients = 6", 'clients = "a"', r"\[experiment\]: clients takes a whole number, not 'a'"),
        ("clients = 6", "clients = 0", r'\[settings."iid"\] with \[experiment\]: clients must be .* at least 1'),
        ("lr = [0.0, 0.1]", "lr = 0.1", r"\[search\] lr takes a list"),
        ("lr = [0.0, 0.1]", "lr = []", r"\[search\] lr gives nothing to try"),
        ("lr = [0.0, 0.1]", 'lr = [0.1, "a"]', r"\[search\]: lr takes a number, not 'a'"),
        ("lr = [0.0, 0.1]", "lr = [-1]", r"\[search\]: lr must be a finite number, at least 0, not -1"),
        ("rounds = 2", "rounds = 2.5", r"\[search\] rounds takes a whole number"),
        ("rounds = 2", "rounds = 0", r"\[search\]: rounds must be .* at least 1"),
        ("[0.0, 10.0]", "0.1", r'\[values\] "fedprox.mu" takes a list'),
        ("[0.0, 10.0]", "[]", r'\[values\] "fedprox.mu" gives nothing to try'),
        ("[0.0, 10.0]", '[0.1, "a"]', r'\[values\] "fedprox.mu": .* not .a.'),
        ("[0.0, 10.0]", "[-1]", r'\[values\] "fedprox.mu": fedprox: mu must be at least 0, got -1'),
        ('"fedprox.mu"', "fedprox.mu", r'"part.field" in quotes'),
        ('"fedprox.mu"', '"swa.start" = [0.5]\n"swa.cycle" = [5]\n"fedprox.mu"', "two fields of 'swa'.* keep one"),
        ("[values]", '[leave_out]\nscafold = "x"\n[values]', r"\[leave_out\]: 'scafold': did you mean 'scaffold'"),
        ("[values]", "[leave_out]\nscaffold = 3\n[values]", r"\[leave_out\] scaffold takes a text"),
        ("[values]", '[leave_out]\nscaffold = ""\n[values]', r"\[leave_out\] scaffold is empty: write why"),
        ("[values]", '[leave_out]\nfedavg = "x"\n[values]', r"\[leave_out\] fedavg cannot be left out"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(old: str, new: str, message: str) -> None:
    assert old in TINY
    Path("bad.toml").write_text(TINY.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        load_plan("bad.toml")
    assert "bad.toml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('model = "logistic(width=3)"', "field of model"),
        ('partition = "natural"', "natural"),
        ("clients = 5000", "5000"),
    ],
)
def test_a_setting_that_cannot_be_run_is_refused_before_any_run(
    change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("late.toml").write_text(TINY.replace("[search]", f'[settings."late"]\n{change}\n[search]'))
    assert main(["leaderboard", "late.toml", "--only", "fedprox", "--out", "board"]) == 2
    told = capsys.readouterr().err
    assert '[settings."late"] with [experiment]: ' in told and message in told
    assert not list(Path().rglob("experiment.toml"))


def test_what_cannot_be_ranked_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", "tiny.toml", "--only", "fedprx"]) == 2
    assert "did you mean 'fedprox'" in capsys.readouterr().err
    assert main(["leaderboard", "tiny.toml", "--add", "nosuch"]) == 2
    assert main(["leaderboard", "absent.toml"]) == 2
    assert main(["leaderboard", "tiny.toml", "--setting", "idd"]) == 2
    assert "did you mean 'iid'" in capsys.readouterr().err
    assert main(["leaderboard", "tiny.toml", "--list"]) == 0
    assert "ditto: it is judged by the clients' own models" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "quantile"), [(2, 2.772), (3, 3.314), (5, 3.858), (10, 4.474)])
def test_quantiles_of_the_range_are_those_of_the_tables(count: int, quantile: float) -> None:
    assert studentized_range(count, 0.05) == pytest.approx(quantile, abs=2e-3)


def test_the_critical_difference_is_that_of_demsars_example() -> None:
    assert critical_difference(4, 14) == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, abs=1e-3)
    assert cliques([1.0, 1.5, 3.0, 3.2], 1.6) == [(0, 1), (1, 2), (2, 3)]


def test_what_the_ranks_tell_apart_is_said_about_the_best_and_about_fedavg() -> None:
    ranks = {"fedacg": 1.0, "scaffold": 1.8, "fedavg": 3.2, "fedprox": 4.0, "fedadam": 6.0}
    lines = rank_lines(Ranking(ranks, 9, 2.0, cliques(list(ranks.values()), 2.0), []))
    assert "Not told apart from the best, fedacg: scaffold." in lines
    assert "Told apart from fedavg: better, fedacg; worse, fedadam." in lines
