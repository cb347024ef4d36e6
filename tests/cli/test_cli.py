"""The command line, run for real: exit statuses, one-line errors, what the tables say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedflat.cli import COMMANDS, main
from fedflat.experiment import Experiment, default_out, slug

SMALL = {
    "data": "digits",
    "partition": "iid",
    "clients": "8",
    "participation": "uniform(2)",
    "model": "logistic",
    "rounds": "3",
    "local-epochs": "1",
    "backend": "serial",
}


def words(**changes: str) -> list[str]:
    """`run` with the options of a small experiment, some changed."""
    values = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["run", *(word for name, value in values.items() for word in (f"--{name}", value))]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("COLUMNS", raising=False)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], status: int = 2) -> str:
    """The one line on stderr with which a command is refused."""
    assert main(argv) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 1 and "Traceback" not in err, err
    assert lines[0].startswith("fedflat: error: ")
    return lines[0]


# ---- help ----


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        f"import sys; from fedflat.cli import main; status = main({argv!r}); "
        "heavy = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules); sys.exit(str(heavy) if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: fedflat")


def test_run_help_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, spec in Experiment.__dataclass_fields__.items():
        assert f"--{name.replace('_', '-')} " in text
        assert spec.metadata["help"].replace("`", "").split()[0] in text
    assert "[dirichlet_equal(delta=0.3)]" in text


def test_nothing_asked_shows_the_help_and_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedflat 0.")


# ---- bad input ----


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rum"], "unknown command 'rum': did you mean 'run'?"),
        (["run", "--locl-epochs", "3"], "unknown field 'locl_epochs': did you mean 'local_epochs'?"),
        (["show", "x", "--pgn", "y"], "unknown option 'pgn': did you mean 'png'?"),
        (["list", "model"], "unknown list 'model': did you mean 'models'?"),
        (["list", "presets"], "presets are listed by `fedflat presets`"),
        (["list", "methods", "fedpro"], "unknown method 'fedpro': did you mean 'fedprox'?"),
        (["list"], "the following arguments are required"),
        (["run", "--lr"], "argument --lr: expected one argument"),
        (["run", "a.toml", "b.toml"], "unexpected 'b.toml'"),
        (["run", "none.toml"], "no such file: none.toml"),
        (["deploy", "init", "here", "--out", "there"], "unknown field 'out'"),
        (["data", "cifar1"], "unknown data set 'cifar1': did you mean 'cifar10'?"),
        (["data", "--fetch"], "which data set?"),
        (["data", "cifar10"], "fetch it with `fedflat data cifar10 --fetch`"),
        (["show", "nowhere"], "no such run: nowhere"),
        (["show", "."], "holds no run: there is no experiment.toml in it"),
        (words(method="fedavgg"), "did you mean 'fedavg"),
        (words(model="logistics"), "unknown model 'logistics': did you mean 'logistic'?"),
        (words(data="digit"), "unknown data set 'digit': did you mean 'digits'?"),
        (words(partition="idd"), "unknown partition 'idd': did you mean 'iid'?"),
        (words(weighting="uniforn"), "unknown weighting 'uniforn': did you mean 'uniform'?"),
        (words(data="DIGITS"), "unknown data set 'DIGITS': did you mean 'digits'?"),
        (["run", "--learning-rate", "1"], "unknown field 'learning_rate': did you mean 'lr'?"),
        (["run", "--epochs", "1"], "unknown field 'epochs': did you mean 'local_epochs'?"),
        (
            ["run", "--method", "sam", "--method", "man"],
            "--method is given twice; for several values write --method A,B",
        ),
        (["analyze", ".", "--model", "nowhere"], "--model takes MODULE:FUNCTION, such as mine:network"),
        (words(participation="0.1"), "participation: cannot read '0.1'"),
        (words(participation="uniform(9)"), "samples 9 of 8 clients"),
        (words(partition="pathological(labels=3)"), "pathological: clients · labels = 24 is no multiple"),
        (words(clients="2000"), "2000 clients cannot share"),
        (words(lr="nan"), "lr must be a finite number, at least 0, not nan"),
        (words(rounds="2.5"), "rounds takes a whole number, not '2.5'"),
        (words(lr="fast"), "lr takes a number, not 'fast'"),
        (words(data="npz(path='none.npz')"), "none.npz is missing"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in refused(capsys, argv)
    assert not Path("runs").exists()


def test_toml_errors_name_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text("lr = \n")
    assert "bad.toml is not valid TOML" in refused(capsys, ["run", "bad.toml"])
    Path("field.toml").write_text("lrr = 0.1\n")
    assert "unknown field 'lrr': did you mean 'lr'?" in refused(capsys, ["run", "field.toml"])


def test_truncated_data_file_is_named_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cut.npz").write_bytes(b"PK\x03\x04 cut short")
    assert "cut.npz" in refused(capsys, words(data="npz(path='cut.npz')"))
    assert Path("cut.npz").exists()


def test_damaged_checkpoint_is_named_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(), "--out", "r", "--quiet"]) == 0
    capsys.readouterr()
    checkpoint = next(Path("r").glob("checkpoint-*.safetensors"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    assert f"{checkpoint} is damaged" in refused(capsys, [*words(), "--out", "r"])
    assert checkpoint.exists()


def test_folder_of_another_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(), "--out", "r", "--quiet"]) == 0
    capsys.readouterr()
    assert "lr: 0.1 there, 0.2 here" in refused(capsys, [*words(lr="0.2"), "--out", "r"])


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(model="nothing"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_failed_run_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(lr="1e30", clip="none", weight_decay="1"), "--quiet"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("fedflat: warning: ") for line in lines[:-1]) and len(lines) > 1
    assert lines[-1].startswith("fedflat: error: ") and "round" in lines[-1]


# ---- running ----


def test_run_writes_a_folder_and_says_what_came_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words()) == 0
    out, err = capsys.readouterr()
    (folder,) = Path("runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts = dict(line.strip().split("  ", 1) for line in out.splitlines())
    assert facts["final accuracy"].strip() == f"{rows[-1]['accuracy']:.4f}"
    assert facts["rounds"].strip() == "3 of 3"
    assert facts["files"].strip() == f"{folder}/"
    assert f"round 3/3  accuracy {rows[-1]['accuracy']:.4f}" in err


def test_same_command_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(rounds="30"), "--quiet"]) == 0
    whole = capsys.readouterr().out.strip()
    before = (Path(whole) / "metrics.jsonl").read_text()
    assert main(words(rounds="30")) == 0
    assert "finished already" in capsys.readouterr().err
    assert (Path(whole) / "metrics.jsonl").read_text() == before


def test_a_run_folder_in_place_of_a_file_is_told_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(), "--out", "r", "--quiet"]) == 0
    capsys.readouterr()
    remedy = refused(capsys, ["run", "r"]).partition("r is a folder; to continue its run: fedflat ")[2]
    assert main(remedy.split()) == 0
    assert "r holds this run, finished already" in capsys.readouterr().err
    assert "name a TOML file" in refused(capsys, ["run", "."])


def test_options_win_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {name.replace("-", "_"): value for name, value in SMALL.items()}
    lines = [f'{k} = "{v}"' for k, v in fields.items()] + ["lr = 0.5", "momentum = 0.9", "nesterov = true"]
    Path("e.toml").write_text("\n".join(lines))
    # Both spellings; a switch before the file does not swallow it.
    argv = ["run", "--drop-last", "e.toml", "--lr", "0.2", "--weight_decay=0", "--nesterov", "false", "--clip", "none"]
    assert main([*argv, "--out", "r", "--quiet"]) == 0
    e = Experiment.from_toml("r/experiment.toml")
    assert (e.lr, e.momentum, e.nesterov, e.weight_decay, e.clip) == (0.2, 0.9, False, 0.0, None)
    assert (e.clients, e.drop_last, e.rounds) == (8, True, 3)
    assert capsys.readouterr().out == "r\n"


def test_default_folder_belongs_to_one_experiment() -> None:
    e = Experiment(method="fedprox(mu=0.1)", data="digits", seed=3)
    assert default_out(e).parent == Path("runs")
    assert default_out(e).name.startswith("fedprox-mu0.1-digits-s3-")
    assert default_out(e) == default_out(e.replace(workers=1, backend="serial"))
    assert len({default_out(x) for x in (e, e.replace(lr=0.2), e.replace(rounds=10))}) == 3
    assert slug("npz(path='a/b.npz')") == "npz-path-a-b.npz"


def test_interrupted_run_goes_on_with_the_same_command(tmp_path: Path) -> None:
    first = _interrupt_at("round 1/")
    (folder,) = (tmp_path / "runs").iterdir()
    done = json.loads((folder / "checkpoint.json").read_text())["round"]
    assert done >= 1
    expected = f"fedflat: interrupted after round {done}; run the same command again to continue from {folder.name}"
    assert first[-1].replace("runs/", "") == expected
    second = _interrupt_at("continuing after")
    assert f"continuing after round {done} of 3000" in second
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))


def _interrupt_at(sign: str) -> list[str]:
    """Run a long experiment, press Ctrl-C when a line on stderr starts with `sign`, and return all those lines."""
    argv = [sys.executable, "-m", "fedflat", *words(rounds="3000", backend="pool", workers="1")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith(sign):
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, lines
    assert not any("Traceback" in line for line in lines)
    return lines


# ---- list, data, show ----


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("methods", ["fedavg", "Train locally, average", "rho=0.05"]),
        ("models", ["mlp", "hidden=(64,)", "A multi-layer perceptron"]),
        ("data", ["cifar100", "folder", "size=32", "1797 handwritten digits"]),
        ("partitions", ["dirichlet_equal", "delta=0.3", "pathological"]),
    ],
)
def test_lists(capsys: pytest.CaptureFixture[str], what: str, facts: list[str]) -> None:
    assert main(["list", what]) == 0
    out = capsys.readouterr().out
    assert all(fact in out for fact in facts)
    assert all(hidden not in out for hidden in ("rng", "targets", "root"))


@pytest.mark.parametrize(
    ("what", "name", "facts"),
    [
        ("methods", "fedprox", ["fedprox(mu=0.01)\n", "Pull every local step", "mu: μ, strength", "g ← g + μ (w_k"]),
        ("methods", "fedsam", ["fedsam(rho=0.05) is fedavg+sam\n", "ε = ρ g/‖g‖"]),
        ("models", "mlp", ["mlp(hidden=(64,))\n", "first to last"]),
        ("partitions", "iid", ["iid\n"]),
    ],
)
def test_one_name_is_explained(capsys: pytest.CaptureFixture[str], what: str, name: str, facts: list[str]) -> None:
    assert main(["list", what, name]) == 0
    out = capsys.readouterr().out
    assert all(fact in out for fact in facts)


def test_data_says_where_each_set_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "data" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "data" / "cifar-10-batches-bin" / "test_batch.bin").touch()
    assert main(["data"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert rows["digits"].strip() == "embedded" and rows["mnist"].strip() == "not here"
    assert rows["cifar10"].strip().endswith("cifar-10-batches-bin")
    assert main(["data", "cifar10", "--data-root", str(tmp_path / "data")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "data" / "cifar-10-batches-bin")
    assert main(["data", "digits"]) == 0


def test_data_show_counts_classes_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    argv = ["data", "digits", "--show", "--partition", "pathological(labels=2)", "--clients", "20", "--seed", "1"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = {line[:19].strip(): line[19:].split() for line in out.splitlines() if " per c" in line}
    assert rows["classes per client"] == ["2", "2", "2"]
    assert "20 clients, 1442 samples, 10 classes" in out
    path = Path(out.split("picture: ")[1].strip())
    assert path.read_bytes().startswith(b"\x89PNG")


def test_show_tells_runs_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for lr in ("0.1", "0.01"):
        assert main([*words(lr=lr), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["show", "runs"]) == 0
    out = capsys.readouterr().out
    assert "fedavg, lr=0.1 " in out and "fedavg, lr=0.01 " in out
    assert "accuracy" in out and "loss" in out and any(0x2800 < ord(c) < 0x2900 for c in out)
    (wrong, *_) = Path("runs").iterdir()
    assert f"did you mean '{Path(wrong).name}'?" in refused(capsys, ["show", f"{wrong}x"])


def test_show_takes_runs_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r").mkdir()
    Path("r/experiment.toml").write_text(Experiment(rounds=40).to_toml())
    assert main(["show", "r"]) == 0
    assert "0 of 40" in capsys.readouterr().out
    rows = [{"round": t, "accuracy": t / 100 if t % 2 else None, "loss": 1.0, "seconds": 0.5} for t in range(1, 31)]
    counts = dict.fromkeys(("clients", "left_out", "floats_up", "floats_down", "steps"), 1)
    rows = [row | counts for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"round": 31, "acc'
    Path("r/metrics.jsonl").write_text(text)
    assert main(["show", "r"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "30 of 40" in line)
    # last, best, its round, mean over rounds 28 to 30 of which one was evaluated, seconds a round
    assert row.split()[-5:] == ["0.2900", "0.2900", "29", "0.2900", "0.5"]
    Path("r/metrics.jsonl").write_text("{\n" + text)
    assert "metrics.jsonl, line 1, is damaged" in refused(capsys, ["show", "r"])


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m fedflat list partitions | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_part_of_ones_own_is_imported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("halved.py").write_text(
        "import dataclasses, fedflat\n\n"
        "@fedflat.register\n@dataclasses.dataclass(frozen=True)\n"
        "class Halved(fedflat.Part):\n"
        "    def correct_gradient(self, local): local.grad.mul_(0.5)\n"
    )
    Path("broken.py").write_text("import nothing_of_this_name")
    assert main([*words(method="fedavg+halved", out="r"), "--import", "halved.py"]) == 0
    assert main(["list", "methods", "halved"]) == 0
    assert main(["show", "r", "--import", "broken"]) == 2
    assert "--import broken: ModuleNotFoundError: No module named 'nothing" in capsys.readouterr().err
