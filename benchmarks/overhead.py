"""What the parts cost: a round of each method over a round of FedAvg, in turns in one run; and what its clients keep.

    python benchmarks/overhead.py [--model cnn64|resnet56|lenet5] [--repeats 5] [--methods man,sam] [--cpu]

--cpu measures the processor time of one client's round in this process and takes the shortest of many, for a machine
that is busy with other work: neighbours take away caches, which no other statistic survives.

cnn64: W1's set-up, 100 clients of 500 CIFAR-shaped samples, 10 a round, 1 epoch, batch 50. resnet56: 2 of these clients
a round and 4 local steps; the time of gradaug, whose passes are random, is held against its expected operations.
lenet5: 2 epochs; those of fedrep are one of the head and one of the body.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from itertools import pairwise
from typing import Any

from speed import CLIENTS, SAMPLES, Fedflat

import fedflat
from fedflat.core.flat import FlatModel
from fedflat.cost import cost_of
from fedflat.models import build_model
from fedflat.specs import split

METHODS = {  # by model: limit of the ratio to FedAvg (nan: a tenth above that of the MACs), models that a client keeps
    "cnn64": {
        "man": (1.05, 0),
        "fedprox": (1.06, 0),
        "scaffold": (1.06, 1),
        "feddyn": (1.06, 1),
        "feddc": (1.06, 2),
        "adabest": (1.06, 1),
        "const": (1.06, 0),
        "sam": (2.05, 0),
        "asam": (2.05, 0),
        "fedspeed": (2.05, 1),
        **dict.fromkeys(("fedcm", "fedacg", "fedexp", "fedlc"), (1.06, 0)),
        **dict.fromkeys(("fedlesam", "fedinit"), (1.06, 1)),
        **dict.fromkeys(("fednsam", "fedgf"), (2.08, 0)),
        **dict.fromkeys(("fedgloss", "fedgamma"), (2.08, 1)),
        "fedsmoo": (2.08, 2),
        "fedntd": (1.58, 0),  # three passes, forward and backward, where FedAvg has two; 5 % above
        "fedsol": (2.47, 0),  # five, but two in the first of ten steps
        "mixup": (1.03, 0),
        "cutout": (1.03, 0),
    },
    "resnet56": {"fedalign": (1.35, 0), "gradaug": (math.nan, 0)},
    "lenet5": {"ditto": (2.1, 1), "plgu_lf(layers=3)": (2.1, 1), "fedrep": (1.1, 0)},
}
CHANGES: dict[str, dict[str, Any]] = {
    "resnet56": {"participation": "uniform(2)", "local_steps": 4},
    "lenet5": {"local_epochs": 2},
}
EQUAL_EPOCHS: dict[str, dict[str, Any]] = {"fedrep": {"method": "fedrep(head_epochs=1)", "local_epochs": 1}}


class Contender(Fedflat):
    """`fedflat.run` of one method on the shared data."""

    def __init__(self, model: str, method: str, federation: fedflat.Federation) -> None:
        self.federation = federation
        self.experiment = settings(model, method)

    def with_seed(self, seed: int) -> Contender:
        """Itself, with other draws."""
        self.experiment = self.experiment.replace(seed=seed)
        return self

    @staticmethod
    def ratio(method: str, pairs: list[tuple[list[float], list[float]]]) -> float:
        """The median over the repeats of a typical round over a typical one of FedAvg."""
        return statistics.median(typical(method, own) / typical(method, base) for own, base in pairs)


class CPUContender(Contender):
    """The same in this process, one client per round, by the processor's time."""

    def round_seconds(self, rounds: int) -> list[float]:
        """Seconds of each round, the first one left out."""
        clock, experiment = CPUClock(), self.experiment.replace(rounds=rounds + 1, backend="serial")
        run = {"federation": self.federation, "participants": lambda t: [0], "progress": False}
        fedflat.run(experiment, callbacks=[clock], **run)
        return [after - before for before, after in pairwise(clock.times)]

    @staticmethod
    def ratio(method: str, pairs: list[tuple[list[float], list[float]]]) -> float:
        """The shortest round over FedAvg's shortest."""
        own, base = (min(seconds for pair in pairs for seconds in pair[side]) for side in (0, 1))
        return own / base


class CPUClock(fedflat.Callback):
    """The processor's time at the end of every round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round(self, run: fedflat.Run, metrics: Any) -> None:
        """Note the time."""
        self.times.append(time.process_time())


def settings(model: str, method: str) -> fedflat.Experiment:
    """The experiment of a model."""
    base = Fedflat.settings(model).replace(method=method, **CHANGES.get(model, {}))
    return base.replace(**EQUAL_EPOCHS.get(method, {}))


def times(model: str, methods: list[str], repeats: int, rounds: int, kind: type[Contender]) -> dict[str, float]:
    """Ratios to FedAvg, which is measured just before and just after each method.

    Only neighbours are compared, since a machine that others use is faster in one minute than in the next.
    """
    federation = Fedflat(model).federation
    rivals = {method: kind(model, method, federation) for method in ("fedavg", *methods)}
    found: dict[str, list[tuple[list[float], list[float]]]] = {method: [] for method in methods}
    for repeat in range(repeats):
        for method in methods:
            turns = ("fedavg", method, method, "fedavg")
            before, one, two, after = (rivals[name].with_seed(repeat).round_seconds(rounds) for name in turns)
            found[method].append((one + two, before + after))
            print(f"{repeat + 1}/{repeats}  {method:17s} {kind.ratio(method, found[method]):.3f} × fedavg", flush=True)
    return {method: round(kind.ratio(method, pairs), 3) for method, pairs in found.items()}


def typical(method: str, values: list[float]) -> float:
    """The lower quartile: what a round takes when nothing else disturbs it much. The median, where rounds differ."""
    if method.startswith("gradaug") or len(values) == 1:
        return statistics.median(values)
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def known(model: str) -> dict[str, tuple[float, int]]:
    """The methods that are of interest for a model."""
    return METHODS.get(model, METHODS["cnn64"])


def limit(model: str, method: str) -> float:
    """The largest ratio that is wanted; nan where nothing is said."""
    if not method.startswith("gradaug"):
        return known(model).get(method, (math.nan, 0))[0]
    macs = [cost_of(settings(model, name), (3, 32, 32), 10).macs for name in (method, "fedavg")]
    return round(1.1 * macs[0] / macs[1], 3)


def kept(model: str, method: str, federation: fedflat.Federation) -> float:
    """Model sizes of state that a client keeps after its second round."""
    experiment = settings(model, method).replace(rounds=2, local_steps=1, backend="serial")
    run = fedflat.run(experiment, federation=federation, participants=lambda t: [0], progress=False)
    states = run.client_state(0)
    size = FlatModel(build_model(model, (3, 32, 32), 10)).size
    return sum(t.numel() * t.element_size() for state in states.values() for t in state.values()) / (4 * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="rounds a measurement")
    parser.add_argument("--methods", help="with commas between them; by default all that are of interest for the model")
    parser.add_argument("--cpu", action="store_true", help="the processor's time instead of the clock's")
    arguments = parser.parse_args()
    model = arguments.model
    methods = split(arguments.methods) if arguments.methods else list(known(model))
    print(f"{CLIENTS} clients of {SAMPLES} samples, {model}")
    kind = CPUContender if arguments.cpu else Contender
    ratios = times(model, methods, arguments.repeats, arguments.rounds, kind)
    federation = Fedflat(model).federation
    memory = {method: round(kept(model, method, federation), 4) for method in methods}
    limits = {method: limit(model, method) for method in methods}
    for method in methods:
        sizes = known(model).get(method, (0, math.nan))[1]
        print(
            f"{method:17s} {ratios[method]:6.3f} × fedavg (limit {limits[method]})  "
            f"keeps {memory[method]} (spec {sizes})"
        )
    print(json.dumps({"ratio to fedavg": ratios, "models kept by a client": memory}))


if __name__ == "__main__":
    main()
