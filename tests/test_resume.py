"""Killed at any moment or interrupted by a signal, a run that is gone on with ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Diary, assert_same_run, members, plain, restless, run_python, start_python, world
from torch import Tensor, nn

import fedflat

EXP = plain(rounds=5, method="diary", participation="uniform(3)", dtype="float32", lr=0.3, momentum=0.9)
SIZES = (6, 10, 14, 8, 12)
SCRIPT = """
import sys, test_resume
test_resume.{name}(*sys.argv[1:])
"""


def go(out: str | Path | None, memory: int = 1 << 30, **options: Any) -> fedflat.Run:
    """The experiment of this file, with a checkpoint after every round."""
    import importlib

    importlib.import_module("fedflat.run").CHECKPOINT_SECONDS = 0.0
    exp = EXP.replace(**{k: v for k, v in options.items() if k in ("backend", "workers", "rounds")})
    rest = {k: v for k, v in options.items() if k not in ("backend", "workers", "rounds")}
    given: dict[str, Any] = {"federation": world(SIZES), "model": restless(), "out": out, "state_memory": memory}
    return fedflat.run(exp, **(given | rest))


@pytest.fixture(scope="module")
def whole() -> fedflat.Run:
    return go(None)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# ---- in processes of their own; one of them forks the others, so that torch is imported once ----


def child(action: Callable[[], Any]) -> int:
    """Run `action` in a fork and give its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


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
            go(out, int(memory))

        status = child(killed)
        if status == 0:
            print(event)
            return
        assert os.WIFSIGNALED(status), f"event {event}: status {status}"
        if child(lambda out=out: go(out, int(memory))) != 0:
            (out / "refused").touch()


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_killed_between_any_two_changes_of_the_folder(tmp_path: Path, whole: fedflat.Run, memory: int) -> None:
    events = int(run_python(SCRIPT.format(name="kill_everywhere"), tmp_path, str(memory)))
    assert events > 40
    outs = sorted(tmp_path.iterdir())
    assert [out.name for out in outs if (out / "refused").exists()] == []
    for out in outs:
        assert_same_run(fedflat.load_run(out, model=restless()), whole, len(SIZES))


def test_killed_and_resumed_the_folder_holds_the_same_files(tmp_path: Path) -> None:
    go(tmp_path / "whole")
    for event in (3, 8, 15):
        status = child(lambda event=event: (die_at(event), go(tmp_path / f"{event}")))
        assert os.WIFSIGNALED(status)
        assert child(lambda event=event: go(tmp_path / f"{event}")) == 0
        assert names(tmp_path / f"{event}") == names(tmp_path / "whole")


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
    """A run on two workers, in a session of its own."""
    Slow.seconds = float(seconds)
    print("ready", flush=True)
    go(folder, backend="pool", workers=2, model=Slow())


def rows(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.002)


def test_killed_at_random_moments_on_two_workers(tmp_path: Path, whole: fedflat.Run) -> None:
    out, luck = tmp_path / "run", random.Random(0)
    for least in (0, 1, 3):
        process = start_python(SCRIPT.format(name="slow_pool"), out, start_new_session=True)
        wait_until(lambda least=least, process=process: rows(out) > least or process.poll() is not None)
        time.sleep(luck.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda process=process: not members(process.pid))  # no worker outlives its parent
    end = go(out, model=Slow())
    assert [row["round"] for row in end.metrics] == [1, 2, 3, 4, 5]
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_interrupted_by_a_signal(tmp_path: Path, whole: fedflat.Run, number: int, backend: str) -> None:
    out = tmp_path / "run"
    process = start_python(SCRIPT.format(name="interrupted"), out, backend, start_new_session=True)
    wait_until(lambda: rows(out) >= 2 or process.poll() is not None)
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    said, error = process.communicate(timeout=60)
    assert process.returncode == 7, error
    assert "interrupted after round" in said
    assert "run the same command again" in said and str(out) in said
    assert not members(process.pid)
    done = len(fedflat.load_run(out, model=Slow()).metrics)
    assert 2 <= done < EXP.rounds
    end = go(out, model=Slow())
    assert torch.equal(end.server_weights, whole.server_weights)
    assert_same_run(end, go(None, model=Slow()), len(SIZES))


def interrupted(folder: str, backend: str) -> None:
    """A run that says how it was interrupted; its last rounds would take for ever."""

    class Slower(fedflat.Callback):
        def round(self, run: Any, metrics: Any) -> None:
            if metrics["round"] == 2 and backend == "serial":
                Slow.seconds = 30.0

    Slow.seconds = 0.05
    try:
        go(folder, backend=backend, workers=2, model=Slow(), callbacks=[Slower()])
    except fedflat.errors.InterruptedRunError as error:
        print(error)
        raise SystemExit(7) from None


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
    assert any(whole.client_state(i)["diary"]["visits"] > 1 for i in range(len(SIZES)) if whole.client_state(i))
