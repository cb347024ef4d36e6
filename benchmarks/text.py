"""Next characters of Shakespeare's roles, one client per role: python benchmarks/text.py --data-root DIR [--seeds 3]

fedavg, fedprox, scaffold, fedasam with SWA, and fedadam on tiny_shakespeare, with a small LSTM and few local steps, so
that a run takes minutes. Runs go into --out and continue where they stopped. Prints accuracy in percent and perplexity
on the roles' test text, mean of the evaluations in the last tenth of the rounds, mean and range over the seeds. Always
answering a blank is right for about 18 % of the characters.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import fedflat
from fedflat.runs.records import record_of

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedprox(mu=0.001)"},
    "scaffold": {"method": "scaffold"},
    "fedasam+swa": {"method": "fedasam(rho=0.5, eta=0.2)+swa(start=0.75, cycle=5, lr_min=0.01)"},
    "fedadam": {"method": "fedadam(beta1=0.9, beta2=0.99, tau=0.001)", "server_lr": 0.003},
}


def experiment(rounds: int, **fields: Any) -> fedflat.Experiment:
    """The setting: 10 of 142 roles per round, 20 steps of 10 windows of 80 characters, LSTM of 64."""
    return fedflat.Experiment(
        data="tiny_shakespeare",
        model="char_lstm(hidden=64, layers=1)",
        participation="uniform(10)",
        rounds=rounds,
        local_steps=20,
        batch_size=10,
        lr=0.8,
        lr_schedule="constant",
        weight_decay=0.0,
        clip=5.0,
        evaluate_every=max(1, rounds // 20),
        evaluate_clients=None,
        **fields,
    )


def main() -> None:
    """Run what is missing, one seed after the other, and print the table of what is finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    parser.add_argument("--out", default="runs/text")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--workers", type=int, help="worker processes; by default one per core")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is finished")
    given = parser.parse_args()
    names, out = given.methods.split(","), Path(given.out)
    for seed, name in product(range(0 if given.table else given.seeds), names):
        e = experiment(given.rounds, seed=seed, workers=given.workers, **METHODS[name])
        fedflat.run(e, root=given.data_root, out=out / f"{name}-s{seed}", progress=False)
        print(f"{name}-s{seed} is finished", flush=True)
    for name in names:
        folders = [out / f"{name}-s{seed}" for seed in range(given.seeds)]
        records = [record_of(folder) for folder in folders if (folder / "experiment.toml").exists()]
        records = [record for record in records if not record.unfinished]
        if records:
            right = [100 * (record.tail("accuracy") or 0.0) for record in records]
            spread = [record.tail("perplexity") or 0.0 for record in records]
            shown = f"accuracy {fmean(right):5.1f} ({min(right):.1f}–{max(right):.1f})"
            print(f"{name:12} {len(records)} seeds  {shown}  perplexity {fmean(spread):.2f}")


if __name__ == "__main__":
    main()
