"""What the parts cost: a round of each method over a round of FedAvg, by the processor's time; and what clients keep.

    python benchmarks/overhead.py [--model cnn64|resnet56|lenet5] [--repeats 9] [--methods man,sam]

Both methods live in this process, on one thread as a worker has it, and take turns: a round of FedAvg, two of the
method, one of FedAvg. Only these neighbours are compared, since programs beside this one take caches and clock from
both alike. Printed are the median of the ratios, their quartiles, the limit, and the models that a client keeps.

cnn64: W1's set-up, a client of 500 CIFAR-shaped samples per round, 1 epoch, batch 50. resnet56: two such clients and 4
local steps; gradaug, whose passes are random, is held against its expected operations, by the sums of its rounds.
lenet5: 2 epochs; those of fedrep are one of the head and one of the body.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from speed import SAMPLES, Fedflat

import fedflat
from fedflat.core.method import Method
from fedflat.core.processes import keep_pages
from fedflat.cost import cost_of
from fedflat.engine.assembly import make_setup
from fedflat.engine.backends.serial import Serial
from fedflat.engine.round_loop import RoundLoop
from fedflat.engine.setup import fresh_server
from fedflat.runs.store import ClientStore
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
CHANGES: dict[str, dict[str, Any]] = {"resnet56": {"local_steps": 4}, "lenet5": {"local_epochs": 2}}
PARTICIPANTS = {"resnet56": (0, 1)}  # by model; otherwise client 0
EQUAL_EPOCHS: dict[str, dict[str, Any]] = {"fedrep": {"method": "fedrep(head_epochs=1)", "local_epochs": 1}}


class Contender:
    """A run of one method on the shared data that goes on round by round."""

    def __init__(self, model: str, method: str, federation: fedflat.Federation) -> None:
        experiment = settings(model, method).replace(backend="serial", rounds=1_000_000)  # the last one is evaluated
        self.setup, self.store = make_setup(experiment, federation=federation), ClientStore()
        chosen = PARTICIPANTS.get(model, (0,))
        self._loop = RoundLoop(self.setup, fresh_server(self.setup), Serial(self.setup), self.store, lambda t: chosen)
        self.seconds()  # the first round has no state yet

    def seconds(self) -> float:
        """Seconds of the processor for one more round."""
        start = time.process_time()
        self._loop.run_round()
        return time.process_time() - start

    @property
    def kept(self) -> float:
        """What client 0 keeps, in models."""
        states = self.store.get(0).values()
        theta = self.setup.model.theta
        kept = sum(tensor.numel() * tensor.element_size() for state in states for tensor in state.values())
        return round(kept / (theta.numel() * theta.element_size()), 4)


def settings(model: str, method: str) -> fedflat.Experiment:
    """The experiment of a model."""
    base = Fedflat.settings(model).replace(method=method, **CHANGES.get(model, {}))
    return base.replace(**EQUAL_EPOCHS.get(method, {}))


def ratios(contender: Contender, fedavg: Contender, repeats: int, random: bool) -> list[float]:
    """The quartiles of the ratios between neighbours; for random costs, three times the ratio of the sums."""
    pairs = []
    for _ in range(repeats):
        before, one, two, after = (rival.seconds() for rival in (fedavg, contender, contender, fedavg))
        pairs.append((one + two, before + after))
    if random or repeats == 1:
        return [sum(own for own, _ in pairs) / sum(base for _, base in pairs)] * 3
    return statistics.quantiles([own / base for own, base in pairs], n=4, method="inclusive")


def known(model: str) -> dict[str, tuple[float, int]]:
    """The methods that are of interest for a model."""
    return METHODS.get(model, METHODS["cnn64"])


def is_random(method: str) -> bool:
    """Whether the passes of a step are drawn at random."""
    return any(len(part.cost_variants()) > 1 for part in Method.parse(method).parts)


def limit(model: str, method: str) -> float:
    """The largest ratio that is wanted; nan where nothing is said."""
    if not is_random(method):
        return known(model).get(method, (math.nan, 0))[0]
    macs = [cost_of(settings(model, name), (3, 32, 32), 10).macs for name in (method, "fedavg")]
    return round(1.1 * macs[0] / macs[1], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn64")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--methods", help="with commas between them; by default all that are of interest for the model")
    arguments = parser.parse_args()
    model = arguments.model
    methods = split(arguments.methods) if arguments.methods else list(known(model))
    torch.set_num_threads(1)
    keep_pages()
    print(f"clients of {SAMPLES} samples, {model}; processor time of a round ÷ FedAvg's")
    federation = Fedflat(model).federation
    fedavg = Contender(model, "fedavg", federation)
    found, kept = dict[str, list[float]](), dict[str, float]()
    for method in methods:
        contender = Contender(model, method, federation)
        low, middle, high = found[method] = [
            round(ratio, 3) for ratio in ratios(contender, fedavg, arguments.repeats, is_random(method))
        ]
        kept[method], sizes = contender.kept, known(model).get(method, (0, math.nan))[1]
        print(
            f"{method:17s} {middle:6.3f} ({low:.3f} to {high:.3f}, limit {limit(model, method)})  "
            f"keeps {kept[method]} (spec {sizes})",
            flush=True,
        )
    medians = {method: quartiles[1] for method, quartiles in found.items()}
    print(json.dumps({"ratio to fedavg": medians, "quartiles": found, "models kept by a client": kept}))


if __name__ == "__main__":
    main()
