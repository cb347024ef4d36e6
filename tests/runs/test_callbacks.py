"""Callbacks: who is called when, what stops a run, and that neither a kill nor an error changes that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_run, blobs, network, plain, timeless, world

import fedflat
from fedflat import EarlyStopping, InputError, TargetStopping
from fedflat.cli import main
from fedflat.core.curves import falls
from fedflat.errors import InterruptedRunError, UnknownNameError
from fedflat.runs.callbacks import Callback, Stopping
from fedflat.runs.records import record_of

EXP = plain(rounds=12, lr=0.3, evaluate_every=2, participation="uniform(2)")


def go(out: Path | None = None, *callbacks: Callback, **changes: Any) -> fedflat.Run:
    """A run of a small network on three clients that is evaluated in every second round."""
    return fedflat.run(EXP.replace(**changes), federation=world(), model=network(), out=out, callbacks=callbacks)


class Until(Callback):
    def __init__(self, last: int, answer: Any = True) -> None:
        self.last, self.answer = last, answer

    def round(self, run: Any, metrics: Any) -> Any:
        return self.answer if metrics["round"] == self.last else None


class Raise(Callback):
    def __init__(self, when: str, error: type[BaseException] = KeyError, last: int = 3) -> None:
        self.when, self.error, self.last = when, error, last

    def start(self, run: Any) -> None:
        if self.when == "start":
            raise self.error("start")

    def round(self, run: Any, metrics: Any) -> None:
        if self.when == "round" and metrics["round"] == self.last:
            raise self.error("round")

    def end(self, run: Any) -> None:
        if self.when == "end":
            raise self.error("end")


class Save(Callback):
    """Saves in every round, as the server of a deployment does."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def round(self, run: Any, metrics: Any) -> None:
        run._state.save()
        self.rows.append(len((run.out / "metrics.jsonl").read_text().splitlines()))


def test_a_checkpoint_that_a_callback_saves_has_the_row_of_its_round(tmp_path: Path) -> None:
    save = Save()
    run = go(tmp_path / "run", save)
    assert save.rows == list(range(1, 13))  # a process that is killed in a later callback loses none
    assert [row["round"] for row in record_of(run.out).metrics] == list(range(1, 13))


class Note(Callback):
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def start(self, run: Any) -> None:
        self.seen.append(f"{self.name} start {len(run.metrics)}")

    def round(self, run: Any, metrics: Any) -> None:
        self.seen.append(f"{self.name} {metrics['round']}")

    def end(self, run: Any) -> None:
        self.seen.append(f"{self.name} {run.status}")


# ---- who is called when ----


def test_started_in_order_ended_in_the_opposite_one_and_all_hear_of_the_round_that_is_the_last() -> None:
    seen: list[str] = []
    go(None, Note("a", seen), Until(2), Note("b", seen))
    assert seen == ["a start 0", "b start 0", "a 1", "b 1", "a 2", "b 2", "b stopped", "a stopped"]


@pytest.mark.parametrize(
    ("when", "heard"),
    [
        ("start", ["a start 0", "a failed"]),
        ("round", ["a start 0", "b start 0", "a 1", "b failed", "a failed"]),
        ("end", ["a start 0", "b start 0", "a 1", "b 1", "b finished", "a finished"]),
    ],
)
def test_what_was_started_is_ended_whatever_a_callback_raises(when: str, heard: list[str]) -> None:
    seen: list[str] = []
    with pytest.raises(KeyError, match=when):
        go(None, Note("a", seen), Raise(when, last=1), Note("b", seen), rounds=1)
    assert seen == heard


@pytest.mark.parametrize(("error", "raised"), [(KeyError, KeyError), (KeyboardInterrupt, InterruptedRunError)])
def test_the_rounds_done_are_saved_when_a_callback_raises(
    tmp_path: Path, error: type[BaseException], raised: type[Exception]
) -> None:
    seen: list[str] = []
    with pytest.raises(raised):
        go(tmp_path / "run", Note("a", seen), Raise("round", error))
    assert seen[-1] == ("a interrupted" if error is KeyboardInterrupt else "a failed")
    half = fedflat.load_run(tmp_path / "run", model=network())
    assert (len(half.metrics), half.status, half.stopped) == (3, "unfinished", "")
    assert_same_run(go(tmp_path / "run"), go(None), 3)


def test_the_rows_of_a_round_are_at_hand_without_reading_the_folder(tmp_path: Path) -> None:
    class Compare(Callback):
        rounds = 0

        def round(self, run: Any, metrics: Any) -> None:
            assert run.last_clients == [row for row in run.clients if row["round"] == metrics["round"]]
            assert run.last_evaluations == [row for row in run.evaluations if row["round"] == metrics["round"]]
            self.rounds += bool(run.last_evaluations)

    compare = Compare()
    given: dict[str, Any] = {"federation": world(client_tests=[blobs(6, seed=i) for i in range(3)]), "model": network()}
    fedflat.run(EXP.replace(evaluate_clients=3), out=tmp_path / "run", callbacks=[compare], **given)
    assert compare.rounds == 4


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(InputError, match="callbacks= takes a list of objects"):
        go(None, EarlyStopping)  # type: ignore[arg-type]


# ---- how a run ended ----


def test_why_a_run_was_stopped_is_kept_and_forgotten_when_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert go(out, Until(3, "enough"), Until(3)).stopped == "enough"
    again = fedflat.load_run(out, model=network())
    assert (again.status, again.stopped, record_of(out).stopped) == ("stopped", "enough", "enough")
    assert go(out, Until(5)).stopped == "Until asked for it"
    end = go(out)
    assert (end.status, end.stopped, record_of(out).stopped) == ("finished", "", "")
    assert_same_run(end, go(None), 3)


def test_a_run_that_goes_on_is_not_shown_as_stopped_before_its_next_checkpoint(tmp_path: Path) -> None:
    class Look(Callback):
        def round(self, run: Any, metrics: Any) -> None:
            assert metrics["round"] == 4 or record_of(run.out).stopped == ""  # 4 is written when callbacks have seen it

    go(tmp_path / "run", Until(3))
    assert record_of(tmp_path / "run").stopped
    go(tmp_path / "run", Look())


# ---- the two rules ----

NAN = float("nan")


@pytest.mark.parametrize(
    ("rule", "values", "stops"),
    [
        (EarlyStopping(patience=2), [0.1, 0.3, 0.2, 0.3, 0.9], 4),  # as good as the best is not better
        (EarlyStopping(patience=2), [0.1, 0.3, 0.2, 0.4, 0.4, 0.4], 6),  # a new best starts the count again
        (EarlyStopping(patience=3), [0.1, 0.3, 0.2, 0.3], None),
        (EarlyStopping(patience=2, min_delta=0.1), [0.1, 0.15, 0.19], 3),  # small steps are none
        (EarlyStopping(patience=2, min_delta=0.1), [0.1, 0.15, 0.25, 0.3], None),  # and are taken together
        (EarlyStopping("loss", patience=1), [2.0, 1.0, 1.5], 3),
        (EarlyStopping("loss", patience=1, mode="max"), [2.0, 1.0], 2),
        (EarlyStopping(patience=1), [], None),
        (TargetStopping(target=0.5), [0.1, 0.5, 0.4], 2),
        (TargetStopping(target=0.5), [0.1, 0.499], None),
        (TargetStopping(target=0.5, average=2), [0.9, 0.0, 0.7, 0.3], 4),
        (TargetStopping(target=0.5, average=5), [0.9, 0.9], None),
        (TargetStopping("train_loss", target=0.5), [0.9, 0.4], 2),
        (TargetStopping("epsilon", target=8.0), [3.0, 9.0], 2),
    ],
)
def test_the_evaluation_after_which_a_rule_stops(rule: Stopping, values: list[float], stops: int | None) -> None:
    sign = -1 if rule.mode == "min" or (rule.mode == "auto" and falls(rule.metric)) else 1
    first = [n for n in range(len(values) + 1) if rule.verdict(values[:n], sign, rule.metric)]
    assert (first[0] if first else None) == stops
    assert first == list(range(first[0], len(values) + 1)) if first else True  # what is enough stays enough


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"min_delta": -0.1}, {"min_delta": NAN}, {"mode": "up"}])
def test_early_stopping_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        EarlyStopping(**wrong)


@pytest.mark.parametrize("wrong", [{"target": NAN}, {"average": 0}, {"mode": "up"}])
def test_target_stopping_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TargetStopping(**wrong)


class Snapshots(Callback):
    """A copy of the run folder after every round: what a kill at that moment would leave."""

    def round(self, run: Any, metrics: Any) -> None:
        shutil.copytree(run.out, f"{run.out}-{metrics['round']:02d}")


def rules() -> list[Stopping]:
    """One of each kind that stops the run of this file half-way."""
    losses = [row["loss"] for row in go(None).metrics if row["loss"] is not None]
    return [TargetStopping("loss", losses[3]), EarlyStopping("loss", patience=2, min_delta=losses[0] - losses[3])]


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_killed_after_any_round_stops_where_the_unharmed_one_does(
    tmp_path: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rules()[which]
    unharmed = go(None, rule)
    assert unharmed.status == "stopped" and 2 < len(unharmed.metrics) < EXP.rounds
    monkeypatch.setattr(sys.modules["fedflat.runs.runner"], "CHECKPOINT_SECONDS", 0.0)
    go(tmp_path / "run", Snapshots(), rule)
    killed = sorted(tmp_path.glob("run-*"))
    assert len(killed) == len(unharmed.metrics)
    for folder in killed:
        resumed = go(folder, rule)
        assert resumed.stopped == unharmed.stopped
        assert_same_run(resumed, unharmed, 3)


@pytest.mark.parametrize("which", [0, 1])
def test_stopped_means_stopped_until_the_rule_is_lifted(tmp_path: Path, which: int) -> None:
    rule, seen = rules()[which], list[str]()
    first = go(tmp_path / "run", rule)
    again = go(tmp_path / "run", rule, Note("a", seen))
    assert timeless(again.metrics) == timeless(first.metrics) and again.stopped == first.stopped
    assert seen == [f"a start {len(first.metrics)}", "a stopped"]
    assert_same_run(go(tmp_path / "run"), go(None), 3)


def test_a_metric_that_no_run_has_is_refused_and_one_that_comes_later_is_not(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        go(None, TargetStopping("acuracy"))
    assert go(None, TargetStopping("clients_low5")).status == "finished"


def test_a_metric_that_was_never_measured_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedflat"):
        go(None, EarlyStopping(), evaluate_every=1)
        assert caplog.text == ""
        go(None, EarlyStopping("personal_mean"))
    assert "personal_mean was measured in no round" in caplog.text


# ---- from the command line ----

FIELDS = {"data": "digits", "model": "mlp", "clients": "10", "participation": "uniform(4)", "rounds": "8"}
SMALL = ["run", *(word for name, value in FIELDS.items() for word in (f"--{name}", value))]
SMALL += ["--local-epochs", "1", "--backend", "serial"]


def test_stopping_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = [*SMALL, "--out", "run", "--stop-at", "accuracy=0.4"]
    assert main(target) == 0
    out, err = capsys.readouterr()
    done = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert 0 < done < 8
    assert f"{done} of 8, stopped: accuracy 0." in out and "has reached 0.4" in out
    assert f"stopped after round {done}: accuracy" in err and "to continue, run it without --stop-at" in err
    assert main(["show", "run"]) == 0
    assert f"{done} of 8, stopped" in capsys.readouterr().out
    assert main(target) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == done
    assert f"stopped after round {done}" in capsys.readouterr().err
    assert main([*SMALL, "--out", "run", "--patience", "loss=50"]) == 0
    assert "8 of 8" in (out := capsys.readouterr().out) and "stopped" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stop-at", "foo=3"], "unknown metric 'foo'"),
        (["--lr", "0.1,0.2", "--patience", "foo=3"], "unknown metric 'foo'"),
        (["--stop-at", "accurracy=0.4"], "unknown metric 'accurracy': did you mean 'accuracy'?"),
        (["--stop-at", "auc=0.9"], "'auc' is not measured in this run: add it with --metrics auc"),
    ],
)
def test_a_metric_that_is_never_measured_is_refused_before_the_first_round(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--out", "run", *words]) == 2
    assert said in capsys.readouterr().err
    assert not any(path.stat().st_size for path in tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stop-at", "high"], "--stop-at takes a number, or metric=number, not 'high'"),
        (["--patience", "loss=2.5"], "--patience takes a number, or metric=number, not 'loss=2.5'"),
        (["--patience", "0"], "a patience of 1 or more"),
        (["--track", "tensorbord"], "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        (["--track", "wandb(mode='onlin')"], "unknown mode 'onlin': did you mean 'online'?"),
        (["--track", "mlflow(url='x')"], "did you mean 'uri'?"),
    ],
)
def test_bad_options_are_refused_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([*SMALL, "--out", str(tmp_path / "run"), *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and out == "" and not (tmp_path / "run").exists()


def test_callbacks_hear_of_every_client_within_a_round() -> None:
    """Three rounds of four clients, one after another."""
    heard: list[tuple[int, int, int]] = []

    class Listener(fedflat.Callback):
        def client(self, run: fedflat.Run, done: int, asked: int) -> None:
            heard.append((len(run.metrics), done, asked))

    e = fedflat.Experiment(data="digits", model="mlp", clients=8, participation="uniform(4)", rounds=3, local_epochs=1)
    fedflat.run(e.replace(backend="serial"), callbacks=[Listener()])
    assert heard == [(round, done, 4) for round in range(3) for done in (1, 2, 3, 4)]


def test_a_terminal_shows_movement_within_a_round(tmp_path: Path) -> None:
    """In a real pseudo-terminal: "client 3 of 20" and a first estimate of the time left before the first round ends."""
    pty = pytest.importorskip("pty")
    words = (
        "run --data digits --model mlp --rounds 1 --local-epochs 60 --clients 20 --participation all --backend serial"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = "150"
        os.execv(sys.executable, [sys.executable, "-m", "fedflat", *words.split(), "--out", str(tmp_path / "run")])
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 65536):
            shown += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert re.search(rb"client \d+ of 20 .* left", shown)


class Thermometer(Callback):
    """Adds a number of its own to every row."""

    def __init__(self, make: Any = float) -> None:
        self.make = make

    def round(self, run: Any, metrics: Any) -> None:
        metrics["degrees"] = self.make(20 + metrics["round"])


@pytest.mark.parametrize("make", [float, torch.tensor, np.float32])
def test_numbers_that_a_callback_adds_are_on_disk_and_read_again(tmp_path: Path, make: Any) -> None:
    go(tmp_path / "run", Thermometer(make), rounds=3)
    rounds, values = fedflat.load_run(tmp_path / "run").curve("degrees")
    assert rounds.tolist() == [1, 2, 3] and values.tolist() == [21.0, 22.0, 23.0]
    assert fedflat.compare([tmp_path / "run"], metric="degrees").rows[0]["last"] == 23.0


def test_numbers_of_a_callback_survive_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        go(tmp_path / "run", Thermometer(), Raise("round", KeyboardInterrupt))
    again = go(tmp_path / "run", Thermometer())
    assert [row["degrees"] for row in again.metrics] == [21.0 + t for t in range(12)]


def test_a_callback_that_adds_what_is_no_number_is_told_so_and_the_round_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a callback added 'degrees' to the metrics: tensor\(\[0\., 0\."):
        go(tmp_path / "run", Thermometer(torch.zeros))
    assert "degrees" not in fedflat.load_run(tmp_path / "run", model=network()).metrics[0]
    assert_same_run(go(tmp_path / "run"), go(None), 1)
