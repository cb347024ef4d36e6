"""Two of ten clients are malicious: what is left of the accuracy, attack by attack and defence by defence.

    python examples/attacks_and_defences.py [--partition "dirichlet_equal(delta=0.3)"] [--rounds 20]

The digits are the embedded ones, so nothing is downloaded. One seed of a small problem shows how the defences work, not
which of them is better.
"""

from __future__ import annotations

import argparse

from fedflat import Experiment, run

ATTACKS = {
    "none": "",
    "sign flip": "+attack(clients=2, scale=10.0)",
    "noise": "+attack(kind='noise', clients=2, scale=30.0)",
    "label flip": "+attack(kind='label_flip', clients=2)",
    "label flip × 10": "+attack(kind='label_flip', clients=2, scale=10.0)",
}
DEFENCES = (
    "fedavg",
    "median",
    "trimmed_mean(beta=0.2)",
    "krum(attackers=2)",
    "multikrum(attackers=2)",
    "centred_clipping(tau=1.0)",
    "norm_bound(limit=1.0)",
)
SETTING = Experiment(
    data="digits",
    partition="iid",
    clients=10,
    participation="all",
    model="mlp(hidden=32)",
    rounds=20,
    local_epochs=1,
    batch_size=32,
    lr=0.3,
    evaluate_every=0,
    evaluate_clients=None,
    backend="serial",
)


def accuracy(experiment: Experiment) -> str:
    return f"{run(experiment, progress=False).metrics[-1]['accuracy']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", default=SETTING.partition)
    parser.add_argument("--rounds", type=int, default=SETTING.rounds)
    options = parser.parse_args()
    setting = SETTING.replace(partition=options.partition, rounds=options.rounds)
    print("| |", " | ".join(ATTACKS), "|")
    print("|---|" + "---|" * len(ATTACKS))
    for defence in DEFENCES:
        found = (accuracy(setting.replace(method=defence + attack)) for attack in ATTACKS.values())
        print(f"| `{defence}` |", " | ".join(found), "|", flush=True)


if __name__ == "__main__":
    main()
