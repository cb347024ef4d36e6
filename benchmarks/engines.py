"""A round on a Ray cluster of this machine and in Flower's simulation against one on the pool, in turns in one run.

    python benchmarks/engines.py [--engines pool,ray,flower] [--repeats 5] [--rounds 4] [--model cnn64]

The workload is W1 of `speed.py`: `cnn64`, 100 clients of 500 CIFAR-shaped samples, 10 a round, 1 epoch, batch 50. Each
engine runs in a process of its own, with two workers, and the first rounds of every measurement are left out. The
engines must come to the same weights, bit for bit. A ratio above 1 is slower than the pool. Then, where a round's time
goes: in the clients' training and what else they do (their seconds, shared by the workers), and in the process that
runs the round loop; the rest is waiting and transport. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from speed import WORKERS, Clock, Fedflat
from stopwatch import watch

import fedflat

WARM_UP = 2  # rounds that are left out
NEEDS = {"pool": (), "ray": ("ray",), "flower": ("flwr", "ray")}
DRIVER = {  # of the Ray engine: where its process spends a round
    "fetching the sum": ["fedflat.engine.backends.ray.remote:Remote.fetch"],
    "packing": ["fedflat.engine.backends.ray.backend:pack"],
}
Spent = Callable[[], dict[str, float]]
Engine = tuple[Callable[[fedflat.Experiment, fedflat.Callback], Any], Spent]


@contextlib.contextmanager
def own_engine(name: str, contender: Fedflat) -> Iterator[Engine]:
    """One of fedflat's back ends: how to run an experiment, and what has been spent so far."""
    spent = watch(DRIVER) if name == "ray" else {}

    def run(experiment: fedflat.Experiment, callback: fedflat.Callback) -> None:
        experiment = experiment.replace(backend=name)
        fedflat.run(experiment, federation=contender.federation, callbacks=[callback], progress=False)

    with cluster() if name == "ray" else contextlib.nullcontext():
        yield run, lambda: dict(spent)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """A cluster for all measurements of this process."""
    from fedflat.engine.backends.ray.cluster import Session

    session = Session("local", WORKERS)
    try:
        yield
    finally:
        session.close()


def compete(name: str, model: str, pipe: Any) -> None:
    """One engine's process: answer every message, a number of rounds, by how long they took, where, and the result."""
    if name == "flower":
        from flower_engine import flower
    contender = Fedflat(model)
    with flower(contender) if name == "flower" else own_engine(name, contender) as (run, spent):
        while (rounds := pipe.recv()) is not None:
            meter = Meter(spent)
            run(contender.experiment.replace(rounds=rounds + WARM_UP), meter)
            pipe.send(meter.found(rounds))


class Meter(Clock):
    """When each round ended, and what had been spent when the warm-up was over."""

    def __init__(self, spent: Spent) -> None:
        super().__init__()
        self.spent = spent

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        """Note the time."""
        super().round(run, metrics)
        self.run = run
        if metrics["round"] == WARM_UP:
            self.base = self.spent()

    def found(self, rounds: int) -> tuple[float, dict[str, float], str]:
        """Seconds a round, what they were spent on, and a hash of the weights that came out."""
        seconds = statistics.mean(after - before for before, after in pairwise(self.times[WARM_UP - 1 :]))
        clients = sum(row["seconds"] for row in self.run.clients if row["round"] > WARM_UP) / rounds / WORKERS
        own = {name: (total - self.base[name]) / rounds for name, total in self.spent().items()}
        parts = {"clients' training": clients} | own
        weights = hashlib.sha256(self.run.server_weights.numpy().tobytes()).hexdigest()
        return seconds, parts | {"the rest": seconds - sum(parts.values())}, weights


def contest(engines: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds a round of each engine, in turns, and what became of them."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for engine in engines:
        pipes[engine], theirs = context.Pipe()
        context.Process(target=compete, args=(engine, arguments.model, theirs)).start()
        theirs.close()
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    parts: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for repeat in range(arguments.repeats + 1):
        results = {}
        for engine, pipe in pipes.items():
            pipe.send(arguments.rounds)
            seconds, spent, results[engine] = pipe.recv()
            if repeat:  # the first is a warm-up
                times[engine].append(seconds)
                parts[engine].append(spent)
        if len(set(results.values())) > 1:
            raise SystemExit(f"the engines disagree: {results}")
        if repeat:
            print("  ".join(f"{engine} {values[-1]:.3f} s" for engine, values in times.items()), flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    return summary(times, parts)


def summary(times: dict[str, list[float]], parts: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the repeats; ratios are of rivals measured next to each other."""
    rivals = [engine for engine in times if engine != "pool" and "pool" in times]
    ratios = {f"{e} / pool": statistics.median(map(float.__truediv__, times[e], times["pool"])) for e in rivals}
    where = {e: {name: statistics.median(p[name] for p in parts[e]) for name in parts[e][0]} for e in parts}
    rounds = {engine: statistics.median(values) for engine, values in times.items()}
    return ratios | {"seconds a round": rounds, "of which": where}


def present(engines: list[str]) -> list[str]:
    """Those whose packages are installed; says which are left out."""
    for engine in engines:
        missing = [package for package in NEEDS[engine] if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{engine} is left out: {missing[0]} is not installed")
    return [e for e in engines if all(map(importlib.util.find_spec, NEEDS[e]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(NEEDS), help="which to measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="rounds a measurement")
    parser.add_argument("--model", default="cnn64")
    arguments = parser.parse_args()
    engines = arguments.engines.split(",")
    if not set(engines) <= set(NEEDS):
        parser.error(f"--engines takes some of {', '.join(NEEDS)}")
    found = contest(present(engines), arguments)
    for engine, seconds in found["seconds a round"].items():
        print(f"{engine:6s} a round            {seconds:8.3f} s")
        for name, spent in found["of which"][engine].items():
            print(f"       {name:20s} {spent:8.3f} s  {100 * spent / seconds:5.1f} %")
    for name in (name for name in found if "/" in name):
        print(f"{name:26s} {found[name]:8.3f}" + ("   (bar: at most 1.10)" if name == "ray / pool" else ""))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
