"""A simulation of a million clients, a thousand per round, with a tiny model: does it stay in flat memory?

    python benchmarks/scale.py [--method fedavg scaffold] [--backend pool] [--rounds 100] [--stack 1]
    python benchmarks/scale.py --clients 10000 --per-round 50 --rounds 20        # the same in seconds

Each method runs in a process of its own, in a run folder, on the embedded digits: `logistic`, one epoch of batches of
10. A client holds 5 to 20 images of one class or two, made when they are asked for; states of clients are kept in 16 MB
of memory and on disk beyond that. Memory is the resident set size after a round, of the process that was started (own)
and of its workers together, at its highest in the first ten rounds and in the last ten; flat is a ratio up to 1.05.
Then, what a round of that many clients sends with larger models. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import family, memory
from torch import Tensor

import fedflat

STATE_MEMORY = 16 << 20  # bytes
FEW = 10  # rounds at either end whose highest memory counts
STRIDE, FEWEST, MORE = 7, 5, 16
LARGER = [(model, method) for model in ("cnn64", "resnet56", "resnet18_gn") for method in ("fedavg", "scaffold")]


class Windows(Sequence[tuple[Tensor, Tensor]]):
    """So many clients over a pool that is sorted by class: each holds some samples that follow each other there."""

    def __init__(self, x: Tensor, y: Tensor, clients: int) -> None:
        order = y.argsort(stable=True)
        self.x, self.y = x[order], y[order]
        self.sizes = FEWEST + np.arange(clients) % MORE

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        places = (client * STRIDE + torch.arange(int(self.sizes[client]))) % len(self.x)
        return self.x[places], self.y[places]


def federation(clients: int) -> fedflat.Federation:
    """So many clients over the embedded digits."""
    digits = fedflat.load_federation("digits", partition="central", clients=1)
    pool = digits.samples(0)
    train = Windows(*pool.batch(torch.arange(len(pool))), clients)
    return fedflat.Federation(
        train, digits.test, sizes=train.sizes, classes=digits.classes, preprocess=digits.preprocess
    )


class Meter(fedflat.Callback):
    """When each round ended, and the MB of this process, of its workers, and of all with shared pages counted once."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.own: list[float] = []
        self.workers: list[float] = []
        self.together: list[float] = []

    def round(self, run: fedflat.Run, metrics: Mapping[str, Any]) -> None:
        """Look."""
        self.times.append(time.perf_counter())
        pids = family(os.getpid())
        self.own.append(memory(pids[0], "Rss"))
        self.workers.append(sum(memory(pid, "Rss") for pid in pids[1:]))
        self.together.append(sum(memory(pid) for pid in pids))
        if metrics["round"] % FEW == 0:
            place = f"{run.experiment.method:10s} round {metrics['round']:4d}"
            print(f"{place}  own {self.own[-1]:6.1f} MB  workers {self.workers[-1]:6.1f} MB", flush=True)


def measure(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    experiment = fedflat.Experiment(
        clients=arguments.clients,
        participation=f"uniform({arguments.per_round})",
        model="logistic",
        method=method,
        rounds=arguments.rounds,
        local_epochs=1,
        batch_size=10,
        lr=0.05,
        evaluate_every=10,
        backend=arguments.backend,
        workers=2,
        stack=arguments.stack,
    )
    meter, start = Meter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, data = Path(folder) / "run", federation(arguments.clients)
        run = fedflat.run(
            experiment, federation=data, out=out, callbacks=[meter], state_memory=STATE_MEMORY, progress=False
        )
        return findings(run, meter, start) | {"MB on disk": disk(out)}


def findings(run: fedflat.Run, meter: Meter, start: float) -> dict[str, Any]:
    """What one run came to."""
    last = run.metrics[-1]
    return {
        "seconds to the end of round 1": round(meter.times[0] - start, 2),
        "seconds a round after it": round((meter.times[-1] - meter.times[0]) / max(1, len(meter.times) - 1), 2),
        "own MB": growth(meter.own),
        "workers' MB": growth(meter.workers),
        "MB of all, shared pages once": round(max(meter.together), 1),
        "MB down a round": megabytes(last["floats_down"] * last["clients"]),
        "MB up a round": megabytes(last["floats_up"] * last["clients"]),
        "accuracy": round(last["accuracy"], 3),
    }


def growth(values: list[float]) -> dict[str, float]:
    """The highest of the first and of the last few rounds, and their ratio."""
    first, last = max(values[:FEW]), max(values[-FEW:])
    return {"first": round(first, 1), "last": round(last, 1), "ratio": round(last / first, 3)}


def megabytes(floats: float) -> float:
    """So many numbers of four bytes."""
    return round(4 * floats / 1e6, 2)


def disk(out: Path) -> dict[str, float]:
    """MB that the files of a run folder take."""
    states = [512 * path.stat().st_blocks / 1e6 for path in (out / "clients").glob("*/*")]
    others = [512 * path.stat().st_blocks / 1e6 for path in out.iterdir() if path.is_file()]
    return {"states": round(sum(states), 1), "state files": len(states), "all else": round(sum(others), 1)}


def traffic(model: str, method: str, clients: int) -> dict[str, float]:
    """MB that so many clients send and are sent in a round, as the library counts it in one of two clients."""
    pairs = [(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))] * 2
    experiment = fedflat.Experiment(
        model=model, method=method, participation="all", rounds=1, local_steps=1, backend="serial"
    )
    row = fedflat.run(experiment, federation=fedflat.Federation(pairs, classes=10), progress=False).metrics[0]
    return {name: megabytes(clients * row[f"floats_{name}"]) for name in ("down", "up")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--per-round", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--method", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--backend", choices=["pool", "serial", "ray"], default="pool")
    parser.add_argument("--stack", type=int, default=1, help="clients that a worker trains at once")
    arguments = parser.parse_args()
    import scale  # this file by the name under which the workers of a cluster find it, too

    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for method in arguments.method:
            found[method] = processes.submit(scale.measure, method, arguments).result()
            for name, value in found[method].items():
                print(f"{method:10s} {name:30s} {value}")
    sent = {f"{model}, {method}": traffic(model, method, arguments.per_round) for model, method in LARGER}
    for name, value in sent.items():
        print(f"{name:22s} MB a round of {arguments.per_round:,} clients: {value['down']:,} down, {value['up']:,} up")
    print(json.dumps(vars(arguments) | {"found": found, "MB a round": sent}))


if __name__ == "__main__":
    main()
