"""A round on a Ray cluster of this machine against one on the pool, measured in turns in one run.

    python benchmarks/engines.py [--repeats 5] [--rounds 4] [--model cnn64]

The workload is W1 of `speed.py`: `cnn64`, 100 clients of 500 CIFAR-shaped samples, 10 a round, 1 epoch, batch 50. Each
engine runs in a process of its own, and the first rounds of every measurement are left out. A ratio above 1 is slower
than the pool. Then, where a round's time goes: in clients (their seconds, shared by the workers), and in the process
that runs the round loop. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from speed import WORKERS, Clock, Fedflat

import fedflat

WARM_UP = 2  # rounds that are left out
DRIVER = {  # of the Ray engine: where its process spends a round
    "waits for workers": ("fedflat.backends.crew", "Crew", "_wait"),
    "fetches the sum": ("fedflat.backends.remote", "Remote", "fetch"),
    "packs what it sends": ("fedflat.backends.ray", "", "pack"),
}


def compete(engine: str, arguments: argparse.Namespace, pipe: Any) -> None:
    """One engine's process: answer every message, a number of rounds, by how long they took, and where."""
    contender = Fedflat(arguments.model)
    experiment = contender.experiment.replace(backend=engine)
    spent = watch_driver() if engine == "ray" else {}
    with cluster() if engine == "ray" else contextlib.nullcontext():
        while (rounds := pipe.recv()) is not None:
            clock, length = Meter(spent), experiment.replace(rounds=rounds + WARM_UP)
            run = fedflat.run(length, federation=contender.federation, callbacks=[clock], progress=False)
            seconds = statistics.mean(after - before for before, after in pairwise(clock.times[WARM_UP - 1 :]))
            clients = sum(row["seconds"] for row in run.clients if row["round"] > WARM_UP) / rounds / WORKERS
            own = {name: (spent[name] - clock.base[name]) / rounds for name in spent}
            pipe.send((seconds, {"clients": clients} | own))


class Meter(Clock):
    """When each round ended, and what had been spent when the warm-up was over."""

    def __init__(self, spent: dict[str, float]) -> None:
        super().__init__()
        self.spent, self.base = spent, dict(spent)

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        """Note the time."""
        super().round(run, metrics)
        if metrics["round"] == WARM_UP:
            self.base = dict(self.spent)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """A cluster for all measurements of this process."""
    from fedflat.backends.cluster import Session

    session = Session("local", WORKERS)
    try:
        yield
    finally:
        session.close()


def watch_driver() -> dict[str, float]:
    """Have the functions of `DRIVER` add up the seconds spent in them."""
    spent: dict[str, float] = defaultdict(float)
    for name, (module, owner, function) in DRIVER.items():
        home: Any = __import__(module, fromlist=["_"])
        home = getattr(home, owner) if owner else home
        setattr(home, function, timed(getattr(home, function), name, spent))
        spent[name] = 0.0
    return spent


def timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    return measured


def contest(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds a round of each engine, in turns, and what became of them."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for engine in ("pool", "ray"):
        pipes[engine], theirs = context.Pipe()
        context.Process(target=compete, args=(engine, arguments, theirs)).start()
    times: dict[str, list[float]] = {engine: [] for engine in pipes}
    parts: dict[str, list[dict[str, float]]] = {engine: [] for engine in pipes}
    for repeat in range(arguments.repeats + 1):
        for engine, pipe in pipes.items():
            pipe.send(arguments.rounds)
            seconds, spent = pipe.recv()
            if repeat:  # the first is a warm-up
                times[engine].append(seconds)
                parts[engine].append(spent)
        if repeat:
            print("  ".join(f"{engine} {values[-1]:.3f} s" for engine, values in times.items()), flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    ratio = statistics.median(ray / pool for ray, pool in zip(times["ray"], times["pool"], strict=True))
    where = {e: {name: statistics.median(p[name] for p in parts[e]) for name in parts[e][0]} for e in parts}
    rounds = {engine: statistics.median(values) for engine, values in times.items()}
    return {"ray / pool": ratio, "seconds a round": rounds, "of which": where}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="rounds a measurement")
    parser.add_argument("--model", default="cnn64")
    found = contest(parser.parse_args())
    for engine, seconds in found["seconds a round"].items():
        print(f"{engine:5s} a round            {seconds:8.3f} s")
        for name, spent in found["of which"][engine].items():
            print(f"      {name:20s} {spent:8.3f} s  {100 * spent / seconds:5.1f} %")
    print(f"ray / pool               {found['ray / pool']:8.3f}   (bar: at most 1.10)")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
