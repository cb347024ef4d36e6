"""What the parts cost: a round of each method over a round of FedAvg, in turns in one run; and what its clients keep.

    python benchmarks/overhead.py [--model cnn64] [--repeats 5] [--methods man,sam]

W1's set-up: 100 clients of 500 CIFAR-shaped samples, 10 a round, 1 epoch, batch 50. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics

from speed import CLIENTS, SAMPLES, Fedflat

import fedflat
from fedflat.flat import FlatModel
from fedflat.models import build_model

METHODS = {  # limit of the ratio to FedAvg, model sizes that a client keeps
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
}


class Contender(Fedflat):
    """`fedflat.run` of one method on the shared data."""

    def __init__(self, model: str, method: str, federation: fedflat.Federation) -> None:
        self.federation = federation
        self.experiment = Fedflat.settings(model).replace(method=method)


def times(model: str, methods: list[str], repeats: int, rounds: int) -> dict[str, float]:
    """Ratios to FedAvg, which is measured between any two of the others; of all rounds the lower quartile counts."""
    federation = Fedflat(model).federation
    rivals = {method: Contender(model, method, federation) for method in ("fedavg", *methods)}
    found: dict[str, list[float]] = {method: [] for method in rivals}
    for repeat in range(repeats):
        for method in methods:
            found["fedavg"] += rivals["fedavg"].round_seconds(rounds)
            found[method] += rivals[method].round_seconds(rounds)
            print(f"{repeat + 1}/{repeats}  {method:10s} {quartile(found[method]):.3f} s a round", flush=True)
    return {method: round(quartile(found[method]) / quartile(found["fedavg"]), 3) for method in methods}


def quartile(values: list[float]) -> float:
    """The lower quartile: what a round takes when nothing else disturbs it much."""
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def kept(model: str, method: str, federation: fedflat.Federation) -> float:
    """Model sizes of state that a client keeps after its second round."""
    experiment = Fedflat.settings(model).replace(method=method, rounds=2, local_steps=1, backend="serial")
    run = fedflat.run(experiment, federation=federation, participants=lambda t: [0], progress=False)
    states = run.client_state(0)
    size = FlatModel(build_model(model, (3, 32, 32), 10)).size
    return sum(t.numel() * t.element_size() for state in states.values() for t in state.values()) / (4 * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="rounds a measurement")
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    print(f"{CLIENTS} clients of {SAMPLES} samples, {arguments.model}")
    ratios = times(arguments.model, methods, arguments.repeats, arguments.rounds)
    federation = Fedflat(arguments.model).federation
    memory = {method: round(kept(arguments.model, method, federation), 4) for method in methods}
    for method in methods:
        limit, sizes = METHODS.get(method, (float("nan"), float("nan")))
        print(f"{method:10s} {ratios[method]:6.3f} × fedavg (limit {limit})  keeps {memory[method]} (spec {sizes})")
    print(json.dumps({"ratio to fedavg": ratios, "models kept by a client": memory}))


if __name__ == "__main__":
    main()
