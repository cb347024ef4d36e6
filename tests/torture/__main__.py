"""Faults by the hundred: `make torture`. Prints a table of what was tried and what failed; all failures must be 0."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fuzz import run_folders
from helpers import assert_same_run, restless, world

import fedflat
from fedflat.errors import FedflatError
from torture.disk import Disk
from torture.image import hindrance, image_cuts
from torture.power import EXP, SIZES, go, power_cuts


def same(out: Path, reference: fedflat.Run, **options: Any) -> str:
    """Whether a run that is gone on with ends as it should; what is wrong if not."""
    try:
        assert_same_run(go(out, **options), reference, len(SIZES))
    except Exception as error:
        return f"{out.name}: {type(error).__name__} {error}"
    return ""


def kills(place: Path, count: int) -> list[str]:
    """Kill a run at random moments, again and again, until one process comes to the end."""
    reference, luck, done, wrong = go(None), random.Random(0), 0, list[str]()
    while done < count:
        out = place / f"killed-{done}"
        for _ in range(min(5, count - done)):
            pid = os.fork()
            if pid == 0:
                go(out)
                os._exit(0)
            time.sleep(luck.uniform(0.0, 0.25))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done += 1
        wrong.append(same(out, reference))
    return [text for text in wrong if text]


class Full(Disk):
    """A disk that is full from some step on."""

    def _hooked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps >= self.at and name in ("fsync", "replace"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return step


def full_disks(place: Path, count: int) -> list[str]:
    """Fill the disk at every step in turn: the error names a path, and with room again the run goes on."""
    reference, wrong = go(None), list[str]()
    for number in range(1, count + 1):
        out = place / f"full-{number}"
        try:
            with Full(out, out, number, random.Random(0)).watched():
                go(out)
        except FedflatError as error:
            if str(place) not in str(error):
                wrong.append(f"{out.name}: the error names no path: {error}")
        except OSError as error:
            wrong.append(f"{out.name}: {error}")
        wrong.append(same(out, reference))
    return [text for text in wrong if text]


class Murder(fedflat.Callback):
    """Kills a worker after every round."""

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        for victim in multiprocessing.active_children()[:1]:
            os.kill(int(victim.pid or 0), signal.SIGKILL)


def worker_deaths(place: Path, count: int) -> list[str]:
    """Kill a worker of the pool after every round."""
    reference, wrong = go(None), list[str]()
    for number in range(-(-count // EXP.rounds)):
        try:
            given: dict[str, Any] = {"federation": world(SIZES), "model": restless(), "callbacks": [Murder()]}
            run = fedflat.run(EXP.replace(backend="pool", workers=2), **given)
            assert_same_run(run, reference, len(SIZES))
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__} {error}")
    return wrong


def wire_messages(place: Path, count: int) -> list[str]:
    """Have the server of a deployment read hostile updates and hellos, half of each."""
    from fuzz.wire import hellos, messages

    return messages(count // 2) + hellos(count - count // 2)


TRIALS: dict[str, tuple[Callable[[Path, int], list[str]], int]] = {
    "kill -9": (kills, 200),
    "power cuts": (power_cuts, 200),
    "cuts of an ext4 image": (image_cuts, 0 if hindrance() else 40),
    "damaged run folders": (run_folders.folders, 1000),
    "wire messages": (wire_messages, 200 if find_spec("flwr") else 0),
    "full disks": (full_disks, 60),
    "dead workers": (worker_deaths, 40),
}


def main() -> int:
    """Run all trials, or a share of them: `python -m torture 0.1`."""
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    torch.set_num_threads(1)
    logging.getLogger("fedflat").setLevel(logging.ERROR)
    failures = 0
    if hindrance():
        print(f"no cuts of a real file system: {hindrance()}")
    print(f"{'fault':<22}{'tried':>8}{'failed':>8}{'seconds':>10}", flush=True)
    for name, (trial, count) in TRIALS.items():
        tried, start = round(count * share), time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            wrong = trial(Path(place), tried)
        print(f"{name:<22}{tried:>8}{len(wrong):>8}{time.monotonic() - start:>10.0f}", flush=True)
        for text in wrong[:10]:
            print("   ", text[:300])
        failures += len(wrong)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
