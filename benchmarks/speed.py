"""Throughput of a FedAvg round through `fedflat.run` against bare PyTorch loops, measured in turns in one run.

    python benchmarks/speed.py [--repeats 5] [--rounds 4] [--only W1] [--cpu] [--against CHECKOUT]

W1 is `cnn64`, W2 `lenet5`: 100 clients of 500 CIFAR-shaped samples, 10 a round, 1 epoch, batch 50. The *naive* limit is
two processes of one thread that run forward, backward and the SGD update on ready batches, contiguous float32; the
*tuned* one does the same channels-last with an allocator that keeps its pages. Both run the network as people write it,
with the ReLU before the pool. A ratio above 1 is faster than that limit. With --cpu, CPU seconds of all processes are
compared, for a machine that is busy with other work; those of fedflat are the CPU seconds of a run less those of a run
of one round. The last line is one JSON object.

With `--against`, this version races another one instead: the same rounds with the code of another checkout, for example
one that `git worktree add CHECKOUT COMMIT` made. A ratio above 1 means that this version is faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import fedflat
from fedflat.core.processes import available_cores, keep_pages
from fedflat.data.preprocess import Preprocess
from fedflat.data.recipes import recipe
from fedflat.models import build_model

MODELS = {"W1": "cnn64", "W2": "lenet5"}
CLIENTS, PARTICIPANTS, SAMPLES, BATCH = 100, 10, 500, 50
STEPS = PARTICIPANTS * SAMPLES // BATCH
WORKERS = min(2, available_cores())


def bare_loop(model: str, tuned: bool, pipe: Any) -> None:
    """One process: answer every message by training so many steps on ready batches."""
    torch.set_num_threads(1)
    if tuned:
        keep_pages()
    module = build_model(model, (3, 32, 32), 10)
    layout = torch.channels_last if tuned else torch.contiguous_format
    module = module.to(memory_format=layout)
    batches = [torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=layout) for _ in range(10)]
    labels = torch.randint(0, 10, (BATCH,))
    parameters = list(module.parameters())
    while (steps := pipe.recv()) is not None:
        start = time.process_time()
        for step in range(steps):
            loss = F.cross_entropy(module(batches[step % 10]), labels)
            loss.backward()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(parameter.grad, alpha=-0.01)
                    parameter.grad = None
        pipe.send(time.process_time() - start)


class Bare:
    """Two such processes, as one contender."""

    def __init__(self, model: str, tuned: bool, cpu: bool = False) -> None:
        self._cpu = cpu
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=bare_loop, args=(model, tuned, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def seconds(self, rounds: int) -> float:
        """Seconds a round."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(rounds * STEPS // WORKERS)
        spent = sum(pipe.recv() for pipe in self.pipes)
        return (spent if self._cpu else time.perf_counter() - start) / rounds

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


class Clock(fedflat.Callback):
    """When each round ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


class Fedflat:
    """`fedflat.run` as a contender."""

    def __init__(self, model: str, precision: str = "float32", augment: bool = False, cpu: bool = False) -> None:
        self._cpu = cpu
        self.experiment = self.settings(model).replace(precision=precision)
        source = torch.Generator().manual_seed(0)  # the same data in every process
        x = torch.randint(0, 256, (CLIENTS * SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=source)
        x = x.contiguous(memory_format=torch.channels_last)  # as `load_federation` keeps images
        y = torch.randint(0, 10, (CLIENTS * SAMPLES,), generator=source)
        pairs = [(x[i : i + SAMPLES], y[i : i + SAMPLES]) for i in range(0, len(x), SAMPLES)]
        preprocess: Preprocess = recipe("paper000" if augment else "none", "cifar10")
        self.federation = fedflat.Federation(pairs, classes=10, preprocess=preprocess)

    @staticmethod
    def settings(model: str) -> fedflat.Experiment:
        """The experiment of W1 and W2."""
        return fedflat.Experiment(
            model=model,
            participation=f"uniform({PARTICIPANTS})",
            local_epochs=1,
            batch_size=BATCH,
            lr=0.01,
            weight_decay=0.0,
            clip=None,
            evaluate_every=0,
            workers=WORKERS,
        )

    def round_seconds(self, rounds: int) -> list[float]:
        """Seconds of each round, the first one left out."""
        clock = Clock()
        experiment = self.experiment.replace(rounds=rounds + 1)
        fedflat.run(experiment, federation=self.federation, callbacks=[clock], progress=False)
        return [after - before for before, after in pairwise(clock.times)]

    def seconds(self, rounds: int) -> float:
        """Seconds a round."""
        if not self._cpu:
            return statistics.mean(self.round_seconds(rounds))
        spent = []
        for count in (0, rounds):
            start = sum(os.times()[:4])  # of this process and of its children that have ended
            self.round_seconds(count)
            spent.append(sum(os.times()[:4]) - start)
        return (spent[1] - spent[0]) / rounds


def contest(workload: str, repeats: int, rounds: int, cpu: bool = False) -> dict[str, float]:
    """Measure all contenders in turns; ratios are medians over the repeats of rivals measured next to each other."""
    model = MODELS[workload]
    rivals: dict[str, Any] = {
        "naive": Bare(model, tuned=False, cpu=cpu),
        "tuned": Bare(model, tuned=True, cpu=cpu),
        "fedflat": Fedflat(model, cpu=cpu),
        "augmented": Fedflat(model, augment=True, cpu=cpu),
    }
    if workload == "W1" and has_bfloat16():
        rivals["bfloat16"] = Fedflat(model, precision="bfloat16")
    for rival in rivals.values():
        rival.seconds(1)
    table: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, rival in rivals.items():
            table[name].append(rival.seconds(rounds))
        print(f"{workload}  " + "  ".join(f"{name} {values[-1]:.3f} s" for name, values in table.items()), flush=True)
    for name in ("naive", "tuned"):
        rivals[name].close()
    return ratios(table)


def ratios(table: dict[str, list[float]]) -> dict[str, float]:
    """Speed of one contender over that of another, median over the repeats."""

    def over(one: str, other: str) -> float:
        pairs = zip(table[one], table[other], strict=True)
        return round(statistics.median(theirs / ours for ours, theirs in pairs), 3)

    found = {
        "fedflat / naive": over("fedflat", "naive"),
        "fedflat / tuned": over("fedflat", "tuned"),
        "tuned / naive": over("tuned", "naive"),
        "augmented / fedflat": over("augmented", "fedflat"),
    }
    if "bfloat16" in table:
        found["bfloat16 / naive"] = over("bfloat16", "naive")
    return found


SERVE = """
import sys
from speed import Fedflat
rival = Fedflat(sys.argv[1])
for rounds in sys.stdin:
    print(rival.seconds(int(rounds)), flush=True)
"""


class Version:
    """`fedflat.run` of a checkout, in a process that imports that checkout only."""

    def __init__(self, checkout: Path, model: str) -> None:
        paths = os.pathsep.join(map(str, (checkout, checkout / "benchmarks")))
        command, pipes = [sys.executable, "-c", SERVE, model], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        alone = {"cwd": checkout, "env": os.environ | {"PYTHONPATH": paths}}
        self._process = subprocess.Popen(command, **pipes, **alone, text=True)

    def seconds(self, rounds: int) -> float:
        """Seconds a round."""
        assert self._process.stdin and self._process.stdout
        print(rounds, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit("the other version failed; see above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def race(workload: str, other: Path, repeats: int, rounds: int) -> dict[str, float]:
    """Speed of this checkout over that of another: median and spread over the repeats, in which they take turns."""
    here = Path(__file__).resolve().parents[1]
    versions = {name: Version(path, MODELS[workload]) for name, path in (("this", here), ("other", other.resolve()))}
    ratios = []
    for version in versions.values():
        version.seconds(1)
    for number in range(repeats):
        order = list(versions) if number % 2 else list(reversed(versions))
        found = {name: versions[name].seconds(rounds) for name in order}
        ratios.append(found["other"] / found["this"])
        print(f"{workload}  this {found['this']:.3f} s  other {found['other']:.3f} s  {ratios[-1]:.3f}", flush=True)
    for version in versions.values():
        version.close()
    spread = {"lowest": min(ratios), "highest": max(ratios)}
    return {name: round(value, 3) for name, value in ({"this / other": statistics.median(ratios)} | spread).items()}


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 (elsewhere PyTorch emulates it, slower than float32)."""
    capability = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bool(capability())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="rounds a measurement")
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of elapsed ones")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="race this checkout of another version")
    arguments = parser.parse_args()
    contest_of: Callable[..., dict[str, float]] = partial(contest, cpu=arguments.cpu)
    compared = partial(race, other=arguments.against) if arguments.against else contest_of
    extent = {"repeats": arguments.repeats, "rounds": arguments.rounds}
    found = {w: compared(w, **extent) for w in MODELS if arguments.only in (None, w)}
    for workload, figures in found.items():
        for name, value in figures.items():
            print(f"{workload}  {name:22s} {value:.3f}")
    if not has_bfloat16() and not arguments.against:
        print("bfloat16 was not measured: this CPU has no kernels for it")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
