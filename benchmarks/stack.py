"""Many small clients: a round through `fedflat.run`, client by client and stacked, against a bare PyTorch loop.

    python benchmarks/stack.py [--only W3] [--repeats 5] [--rounds 3] [--stacks 1 32 128 auto] [--workers 1 2] [--cpu]

W3: logistic regression 64 → 10, 1,000 clients of 5–20 samples, batch 10. W4: MLP 784-200-200-10, 100 clients of 100
samples, batch 20. W5: CNN of 16 and 32 channels 5×5 on 28×28, 50 clients of 60 samples, batch 20. All clients take part
in every round, with one epoch of SGD; nothing is evaluated. The bare loop is one process with one thread: for every
client it loads the weights, takes the same number of steps on ready batches and adds up the differences. Figures are
medians over rounds, measured in turns; a ratio above 1 is faster than the bare loop. With --cpu they are CPU seconds of
all processes, for a machine that is busy with other work: those of a run less those of a run of one round. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat.core.processes import single_thread

LR = 0.05


class Workload(NamedTuple):
    """A network and its clients; `least` and `most` are the sizes of clients."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    least: int
    most: int
    batch: int

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of every client."""
        source = torch.Generator().manual_seed(0)
        sizes = torch.randint(self.least, self.most + 1, (self.clients,), generator=source).tolist()
        return [
            (torch.randn(n, *self.shape, generator=source), torch.randint(10, (n,), generator=source)) for n in sizes
        ]


def mlp() -> nn.Module:
    """784-200-200-10."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Module:
    """Two convolutions of 5×5 with 16 and 32 channels, each followed by pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


WORKLOADS = {
    "W3": Workload(lambda: nn.Linear(64, 10), (64,), 1000, 5, 20, 10),
    "W4": Workload(mlp, (784,), 100, 100, 100, 20),
    "W5": Workload(cnn, (1, 28, 28), 50, 60, 60, 20),
}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def bare_round(
    module: nn.Module, batches: list[list[tuple[Tensor, Tensor]]], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one round of the bare loop."""
    parameters = list(module.parameters())
    weights = [p.detach().clone() for p in parameters]
    start = clock()
    total = [torch.zeros_like(w) for w in weights]
    for client in batches:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        for x, y in client:
            F.cross_entropy(module(x), y).backward()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.add_(parameter.grad, alpha=-LR)
                    parameter.grad = None
        with torch.no_grad():
            for parameter, weight, s in zip(parameters, weights, total, strict=True):
                s.add_(parameter - weight)
    return clock() - start


class Clock(fedflat.Callback):
    """When each round ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, run: fedflat.Run) -> None:
        """The first round begins."""
        self.times = [time.perf_counter()]

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def fedflat_rounds(work: Workload, data: list[tuple[Tensor, Tensor]], rounds: int, **changes: Any) -> list[float]:
    """Seconds of every round but the first, in which workers start."""
    settings: dict[str, Any] = {
        "participation": "all",
        "local_epochs": 1,
        "batch_size": work.batch,
        "lr": LR,
        "weight_decay": 0.0,
        "clip": None,
        "evaluate_every": 0,
        "evaluate_clients": None,
        "rounds": rounds + 1,
    }
    experiment, clock = fedflat.Experiment(**(settings | changes)), Clock()
    federation = fedflat.Federation(data, classes=10)
    fedflat.run(experiment, federation=federation, model=work.network(), callbacks=[clock], progress=False)
    return [after - before for before, after in pairwise(clock.times)][1:]


def fedflat_cpu(work: Workload, data: list[tuple[Tensor, Tensor]], rounds: int, **changes: Any) -> list[float]:
    """CPU seconds of a round."""
    spent = []
    for count in (0, rounds):
        start = cpu_seconds()
        fedflat_rounds(work, data, count, **changes)
        spent.append(cpu_seconds() - start)
    return [(spent[1] - spent[0]) / rounds]


def measure(
    work: Workload, repeats: int, rounds: int, stacks: list[str], workers: list[int], cpu: bool = False
) -> dict[str, float]:
    """Milliseconds per client, by contender."""
    data = work.data()
    module, batches = (
        work.network(),
        [list(zip(x.split(work.batch), y.split(work.batch), strict=True)) for x, y in data],
    )
    found: dict[str, list[float]] = {}
    clock, ours = (cpu_seconds, fedflat_cpu) if cpu else (time.perf_counter, fedflat_rounds)
    for _ in range(repeats):
        with single_thread():
            found.setdefault("bare", []).extend(bare_round(module, batches, clock) for _ in range(rounds))
        for stack in stacks:
            for count in workers:
                name = f"stack={stack}, {count} worker{'s' * (count > 1)}"
                spent = ours(work, data, rounds, workers=count, stack=stack)
                found.setdefault(name, []).extend(spent)
    return {name: 1000 * statistics.median(times) / work.clients for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per measurement")
    parser.add_argument("--stacks", nargs="+", default=["1", "32", "auto"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of elapsed ones")
    arguments = parser.parse_args()
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.only:
        found = measure(
            WORKLOADS[name],
            arguments.repeats,
            arguments.rounds,
            arguments.stacks,
            arguments.workers,
            arguments.cpu,
        )
        for contender, spent in found.items():
            print(
                f"{name}  {contender:22s} {spent:8.3f} ms per client  {found['bare'] / spent:6.2f} × bare", flush=True
            )
        result[name] = {
            contender: {"ms per client": round(spent, 4), "times bare": round(found["bare"] / spent, 3)}
            for contender, spent in found.items()
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
