"""Processes that share a series of runs: each run is made once, and nobody waits for a process that has died."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers import start_python

import fedflat
from fedflat.runs.folder import RunFolder
from fedflat.runs.series import run_all, series
from fedflat.runs.sharing import locked

SERIES = """
import sys
from pathlib import Path
import fedflat
from fedflat.runs.series import run_all, series

class Tell(fedflat.Callback):
    def start(self, run):
        print(run.experiment.seed, flush=True)
        sys.stdin.readline() if run.experiment.seed == 0 and sys.argv[2] == "waits" else None

base = fedflat.Experiment(data="digits", clients=4, participation="all", model="logistic", rounds=8, backend="serial")
runs = series([base.replace(seed=seed) for seed in range(6)], sys.argv[1])
run_all(runs, progress=False, callbacks=lambda: [Tell()])
assert all(run.finished and not run.failure for run in runs)
"""


def test_two_processes_share_the_runs_of_a_series(tmp_path: Path) -> None:
    both = [start_python(SERIES, tmp_path, "at once") for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    made = [sorted(map(int, out.split())) for out, _ in said]
    assert sorted(made[0] + made[1]) == [0, 1, 2, 3, 4, 5]


def test_the_runs_of_a_process_that_is_killed_are_made_by_the_other(tmp_path: Path) -> None:
    holder = start_python(SERIES, tmp_path, "waits", stdin=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "0\n"
    other = start_python(SERIES, tmp_path, "at once")
    assert other.stdout is not None
    seeds = [other.stdout.readline().strip() for _ in range(5)]
    assert seeds == ["1", "2", "3", "4", "5"]  # the first run is put off
    holder.send_signal(signal.SIGKILL)
    out, error = other.communicate(timeout=300)
    assert other.returncode == 0, error
    assert out == "0\n"
    assert "waiting for other processes; runs still with them: 1" in error


def test_a_run_that_another_process_finished_is_not_made_again(tmp_path: Path) -> None:
    base = fedflat.Experiment(
        data="digits", clients=4, participation="all", model="logistic", rounds=1, backend="serial"
    )
    first, second = (series([base.replace(seed=seed) for seed in (0, 1)], tmp_path) for _ in range(2))
    begun: list[int] = []

    class Elsewhere(fedflat.Callback):
        def start(self, run: fedflat.Run) -> None:
            begun.append(run.experiment.seed)
            if run.experiment.seed == 0:
                run_all(second[1:], progress=False)  # as another process would, meanwhile

    run_all(first, progress=False, callbacks=lambda: [Elsewhere()])
    assert begun == [0] and all(run.finished for run in first)


def test_work_on_a_folder_waits_until_the_folder_is_free_and_keeps_others_out(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    holder, done = RunFolder(first), list[Path]()
    holder.lock()
    for folder in locked([first, second], folder=lambda path: path, done=done.__contains__):
        assert RunFolder(folder).in_use
        done.append(folder)
        holder.unlock()
    assert done == [second, first]
    assert not RunFolder(first).in_use and not RunFolder(second).in_use


def test_work_that_another_process_has_done_meanwhile_is_left_out(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = {first: False, second: False}
    for folder in locked([first, second], folder=lambda path: path, done=made.__getitem__):
        assert folder == first
        made[first] = made[second] = True
