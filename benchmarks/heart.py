"""Heart disease in four hospitals beside FLamby's published figures: python benchmarks/heart.py [--seeds 5]

Logistic regression, batches of 4, 100 local steps, 15 rounds, all hospitals in every round, as in FLamby (Ogier du
Terrail et al., 2022). The adaptive methods and FedProx have the learning rates of its configuration file; FedAvg and
SCAFFOLD have 0.001 (0.0001 there). Accuracy in percent on the pooled test set and on each hospital's, mean ± sample
standard deviation over the seeds, after the last round.
"""

from __future__ import annotations

import argparse
import statistics

import fedflat
from fedflat.data.heart import HOSPITALS

PUBLISHED = {  # method of fedflat → fields, pooled test accuracy of FLamby, per hospital
    "fedavg": ({"lr": 0.001}, 74.8, (73.1, 71.9, 65.0, 64.0)),
    "fedprox(mu=0.01)": ({"lr": 0.001}, 74.8, (73.1, 71.9, 65.0, 64.0)),
    "scaffold": ({"lr": 0.001}, 74.8, (73.1, 71.9, 65.0, 64.0)),
    "fedadam(beta1=0.9, beta2=0.999, tau=1e-8)": ({"lr": 1e-4, "server_lr": 0.01}, 77.9, (75.2, 74.6, 73.8, 66.7)),
    "fedyogi(beta1=0.9, beta2=0.999, tau=1e-8)": ({"lr": 1e-4, "server_lr": 0.01}, 77.9, (76.0, 75.3, 73.8, 67.6)),
    "fedadagrad(beta1=0.9, tau=1e-8)": ({"lr": 1e-4, "server_lr": 10.0}, 77.9, ()),
}
PROTOCOL = fedflat.Experiment(
    data="heart",
    model="logistic",
    participation="all",
    rounds=15,
    local_steps=100,
    batch_size=4,
    lr_schedule="constant",
    weight_decay=0.0,
    clip=None,
    backend="serial",
)


def main() -> None:
    """Run all methods with all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    print(f"{'method':42} {'pooled, ours':>14} {'FLamby':>7}   {'  '.join(HOSPITALS)}: ours (FLamby)")
    for method, (fields, theirs, hospitals) in PUBLISHED.items():
        runs = [fedflat.run(PROTOCOL.replace(method=method, seed=seed, **fields), progress=False) for seed in seeds]
        pooled = [100 * run.metrics[-1]["accuracy"] for run in runs]
        own = [statistics.fmean(100 * run.evaluations[i]["common"] for run in runs) for i in range(len(HOSPITALS))]
        beside = [f"{a:.1f} ({b})" for a, b in zip(own, hospitals or ["–"] * len(own), strict=True)]
        spread = statistics.stdev(pooled) if len(pooled) > 1 else 0.0
        print(f"{method:42} {statistics.fmean(pooled):7.1f} ± {spread:4.1f} {theirs:7}   {'  '.join(beside)}")


if __name__ == "__main__":
    main()
