"""Killed at any moment or interrupted by a signal, a run that is gone on with ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Diary, assert_same_run, members, plain, restless, run_python, start_python, world
from torch import Tensor, nn

import fedflat
from fedflat.errors import InterruptedRunError

EXP = plain(rounds=5, method="diary", participation="uniform(3)", dtype="float32", lr=0.3, momentum=0.9)
SIZES = (6, 10, 14, 8, 12)
SCRIPT = """
import sys
from runs import test_resume
test_resume.{name}(*sys.argv[1:])
"""


def go(out: str | Path | None, memory: int = 1 << 30, **options: Any) -> fedflat.Run:
    """The experiment of this file, with a checkpoint after every round."""
    engine: Any = sys.modules["fedflat.runs.runner"]
    usual, engine.CHECKPOINT_SECONDS = engine.CHECKPOINT_SECONDS, 0.0
    fields = {k: options.pop(k) for k in ("backend", "workers", "rounds") if k in options}
    given: dict[str, Any] = {"federation": world(SIZES), "model": restless(), "out": out, "state_memory": memory}
    try:
        return fedflat.run(EXP.replace(**fields), **(given | options))
    finally:
        engine.CHECKPOINT_SECONDS = usual


@pytest.fixture(scope="module")
def whole() -> fedflat.Run:
    return go(None)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# ---- in processes of their own; one of them forks the others, so that torch is imported once ----


def fork(action: Callable[[], Any]) -> int:
    """Run `action` in a process and a session of its own."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            action()
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def finish(pid: int) -> int:
    """Wait for a process; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(event: int) -> None:
    """Have this process kill itself right before its `event`-th change of a folder (a rename or a deletion)."""
    count = 0

    def hooked(real: Callable[..., None]) -> Callable[..., None]:
        def change(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args, **kwargs)

        return change

    os.replace, os.unlink = hooked(os.replace), hooked(os.unlink)


def kill_everywhere(folder: str, memory: str) -> None:
    """Kill a run before each of its changes of the folder in turn, then run the same command again."""
    torch.set_num_threads(1)
    for event in range(1, 1000):
        out = Path(folder) / f"{event:03d}"

        def killed(event: int = event, out: Path = out) -> None:
            die_at(event)
            go(out, int(memory), rounds=3)

        code = finish(fork(killed))
        if code == 0:
            return
        assert code == -signal.SIGKILL, f"event {event}: {code}"
        if finish(fork(lambda out=out: go(out, int(memory), rounds=3))) != 0:
            (out / "refused").touch()


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_killed_between_any_two_changes_of_the_folder(tmp_path: Path, memory: int) -> None:
    run_python(SCRIPT.format(name="kill_everywhere"), tmp_path, str(memory))
    *killed, last = sorted(tmp_path.iterdir())
    assert len(killed) > 20
    reference, wrong = fedflat.load_run(last, model=restless()), dict[str, str]()
    assert_same_run(reference, go(None, rounds=3), len(SIZES))
    for out in killed:
        if (out / "refused").exists():
            wrong[out.name] = "refused to go on"
            continue
        assert_same_run(fedflat.load_run(out, model=restless()), reference, len(SIZES))
        if names(out) != names(last):
            wrong[out.name] = f"other files: {sorted(names(out) ^ names(last))}"
    assert wrong == {}


def test_a_table_cut_anywhere_past_the_checkpoint_is_mended(tmp_path: Path, whole: fedflat.Run) -> None:
    class Stop(fedflat.Callback):
        def round(self, run: Any, metrics: Any) -> bool:
            return metrics["round"] == 3

    for cut in (1, 5, 40):
        out = tmp_path / str(cut)
        go(out, callbacks=[Stop()])
        with (out / "metrics.jsonl").open("a") as file:
            file.write('{"round": 4, "accuracy": 0.123456, "loss": 1.5}'[:cut])
        with (out / "clients.jsonl").open("a") as file:
            file.write('{"round": 4, "client": 0}\n{"round": 4, "cli')
        assert_same_run(go(out), whole, len(SIZES))


class Slow(nn.Module):
    """Takes so long over a batch that a kill finds it at work."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = restless()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return self.net(x)


def slow_pool(folder: str, seconds: str = "0.004") -> None:
    """A run on two workers that takes its time."""
    Slow.seconds = float(seconds)
    go(folder, backend="pool", workers=2, model=Slow())


def rows(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.002)


def kill_at_random(folder: str) -> None:
    """Kill a run on two workers thrice; every time all its workers must end."""
    torch.set_num_threads(1)
    out, luck = Path(folder), random.Random(0)
    for least in (0, 1, 3):
        pid = fork(lambda: slow_pool(folder))
        wait_until(lambda least=least: rows(out) > least)
        time.sleep(luck.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        finish(pid)
        wait_until(lambda pid=pid: not members(pid))


def test_killed_at_random_moments_on_two_workers_which_do_not_outlive_it(tmp_path: Path, whole: fedflat.Run) -> None:
    run_python(SCRIPT.format(name="kill_at_random"), tmp_path / "run")
    end = go(tmp_path / "run", model=Slow())
    assert torch.equal(end.server_weights, whole.server_weights)
    assert_same_run(end, go(None, model=Slow()), len(SIZES))


def test_a_killed_run_can_be_gone_on_with_at_once(tmp_path: Path) -> None:
    """Its workers, which may be at work for long, must not keep the folder to themselves."""
    out = tmp_path / "run"
    process = start_python(SCRIPT.format(name="slow_pool"), out, "3", start_new_session=True)
    wait_until(lambda: len(members(process.pid)) == 3 and (out / "experiment.toml").exists())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(go(out, model=Slow()).metrics) == 5


def interrupted(folder: str, backend: str) -> None:
    """A run that writes down how it was interrupted; serially, its third round would take for ever."""

    class Slower(fedflat.Callback):
        def round(self, run: Any, metrics: Any) -> None:
            if metrics["round"] == 2 and backend == "serial":
                Slow.seconds = 60.0

    Slow.seconds = 0.05
    try:
        go(folder, backend=backend, workers=2, model=Slow(), callbacks=[Slower()])
    except fedflat.errors.InterruptedRunError as error:
        Path(folder + ".said").write_text(str(error))
        raise SystemExit(7) from None


SIGNALS = {"SIGINT": os.killpg, "SIGTERM": os.kill}  # a terminal sends Ctrl-C to the workers too


def interrupt(folder: str) -> None:
    """Send each signal to a run on each back end, in its third round or thereabouts."""
    torch.set_num_threads(1)
    for backend in ("serial", "pool"):
        for name, send in SIGNALS.items():
            out = Path(folder) / f"{backend}-{name}"
            pid = fork(lambda out=out, backend=backend: interrupted(str(out), backend))
            wait_until(lambda out=out: rows(out) >= 2)
            send(pid, getattr(signal, name))
            assert finish(pid) == 7
            assert not members(pid)


def test_interrupted_by_a_signal(tmp_path: Path, whole: fedflat.Run) -> None:
    run_python(SCRIPT.format(name="interrupt"), tmp_path)
    again = go(None, model=Slow())
    for out in (tmp_path / f"{backend}-{name}" for backend in ("serial", "pool") for name in SIGNALS):
        said = Path(f"{out}.said").read_text()
        done = len(fedflat.load_run(out, model=Slow()).metrics)
        assert 2 <= done < EXP.rounds
        assert f"interrupted after round {done}" in said
        assert "run the same command again" in said and str(out) in said
        end = go(out, model=Slow())
        assert torch.equal(end.server_weights, whole.server_weights)
        assert_same_run(end, again, len(SIZES))


class Press(fedflat.Callback):
    """Presses Ctrl-C once the last round is done."""

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        if metrics["round"] == run.experiment.rounds:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_after_the_last_round_is_not_lost_nor_is_the_round(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError, match=r"interrupted after round 2$"):
        go(tmp_path, rounds=2, callbacks=[Press()])
    assert fedflat.load_run(tmp_path, model=restless()).status == "finished"


def test_signal_handlers_are_put_back(whole: fedflat.Run) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    go(None, rounds=1)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_in_a_thread_works_like_any_other(whole: fedflat.Run) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert_same_run(threads.submit(go, None).result(timeout=60), whole, len(SIZES))


def test_the_part_of_these_tests_uses_every_kind_of_state(whole: fedflat.Run) -> None:
    assert Diary().name in whole.server_state
    assert any(whole.client_state(i)["diary"]["rounds_seen"] > 1 for i in range(len(SIZES)) if whole.client_state(i))
