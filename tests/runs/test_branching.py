"""Runs of a series that have their first rounds in common: these are run once, with the bits of running them again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from helpers import start_python

import fedflat
from fedflat.runs.branching import common_rounds
from fedflat.runs.series import Member, run_all, series
from tests.parts.conformance.harness import assert_same_bits

BASE = fedflat.Experiment(
    data="digits",
    partition="dirichlet_equal(delta=0.3)",
    clients=6,
    participation="uniform(3)",
    model="logistic",
    rounds=8,
    local_epochs=1,
    batch_size=16,
    evaluate_clients=2,
    backend="serial",
)
METHODS = ("scaffold", "scaffold+swa(start=0.5, cycle=2)", "scaffold+swa(start=0.75, cycle=1)", "fedavg")
LED = """
import os, signal, sys
import fedflat
from fedflat.runs.series import run_all, series
from fedflat.runs.state import RunState
from tests.runs.test_branching import BASE, METHODS

class Tell(fedflat.Callback):
    def start(self, run):
        print("began", len(run.metrics), flush=True)
        sys.stdin.readline() if sys.argv[2] == "waits" else None
    def round(self, run, metrics):
        print(run.experiment.method, flush=True)

class Dying(RunState):
    def save(self):
        os.kill(os.getpid(), signal.SIGKILL)

def adopt(self, earlier):
    self.__class__ = Dying
    RunState.adopt(self, earlier)

if sys.argv[2] == "dies":
    import fedflat.runs.runner
    fedflat.runs.runner.RunState = type("Begun", (RunState,), {"adopt": adopt})
run_all(series([BASE.replace(method=m) for m in METHODS[:2]], sys.argv[1]), progress=False, callbacks=lambda: [Tell()])
"""


def members(folder: Path) -> list[Member]:
    return series([BASE.replace(method=method) for method in METHODS], folder)


def assert_as_if_run_alone(member: Member, folder: Path) -> None:
    """Weights, states, every row of every table but its time, and the best model."""
    alone, led = fedflat.run(member.experiment, out=folder), fedflat.load_run(member.folder)
    assert_same_bits(alone, led)
    for table in ("metrics", "clients", "evaluations"):
        mine, theirs = ([timeless(row) for row in getattr(run, table)] for run in (led, alone))
        assert mine == theirs, table
    assert led.best == alone.best
    best = [(path / "best.safetensors").read_bytes() for path in (member.folder, folder)]
    assert best[0] == best[1]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "seconds"}


def test_rounds_that_runs_have_in_common_are_run_once_with_the_same_bits(tmp_path: Path) -> None:
    done: dict[str, int] = {}

    class Count(fedflat.Callback):
        def round(self, run: fedflat.Run, metrics: dict[str, Any]) -> None:
            done[run.experiment.method] = done.get(run.experiment.method, 0) + 1

    runs = run_all(members(tmp_path / "led"), progress=False, callbacks=lambda: [Count()])
    assert [done[member.experiment.method] for member in runs] == [8, 4, 2, 8]
    for member in runs:
        assert_as_if_run_alone(member, tmp_path / "alone" / member.folder.name)


@pytest.mark.parametrize(
    ("change", "common"),
    [({}, 6), ({"lr": 0.5}, 0), ({"seed": 1}, 0), ({"rounds": 9}, 0), ({"method": "scaffold+man+swa"}, 0)],
)
def test_runs_that_differ_in_anything_else_have_nothing_in_common(change: dict[str, Any], common: int) -> None:
    one = BASE.replace(method="scaffold")
    assert common_rounds(one, one.replace(**{"method": "scaffold+swa", **change})) == common
    assert common_rounds(BASE.replace(method="swa"), BASE.replace(method="fedavg")) == 6
    unsure = one.replace(stack="auto")  # each run would choose its own stack
    assert common_rounds(unsure, unsure.replace(method="scaffold+swa")) == 0


def test_a_process_that_is_killed_while_it_copies_costs_nothing_but_time(tmp_path: Path) -> None:
    dying = start_python(LED, tmp_path / "led", "dies")
    dying.communicate(timeout=300)
    assert dying.returncode == -signal.SIGKILL
    runs = run_all(members(tmp_path / "led"), progress=False)
    assert (runs[1].folder / "experiment.toml").exists()
    for member in runs[:2]:
        assert_as_if_run_alone(member, tmp_path / "alone" / member.folder.name)


def test_another_process_waits_for_the_rounds_that_it_needs(tmp_path: Path) -> None:
    leading = start_python(LED, tmp_path, "waits", stdin=-1)
    assert leading.stdout is not None and leading.stdin is not None
    assert leading.stdout.readline() == "began 0\n"
    other = start_python(LED, tmp_path, "at once", stdin=-1)
    assert other.stderr is not None
    assert "runs still with them: 2" in other.stderr.readline()
    leading.stdin.write("\n\n")
    leading.stdin.flush()
    said = leading.communicate(timeout=300)[0] + other.communicate(timeout=300)[0]
    rounds = [line for line in said.splitlines() if not line.startswith("began")]
    assert (rounds.count(METHODS[0]), rounds.count("scaffold+swa(start=0.5, cycle=2)")) == (8, 4)
    assert "began 4" in said
    assert all(member.finished for member in members(tmp_path)[:2])
