"""Segmentation on CamVid, the runs of a table beside paper 003's table 8: python benchmarks/camvid.py --data-root DIR

fedavg, fedsam and fedasam, each with and without SWA, and fedavg with SiLoBN, on the scenes *dusk* and *carpark*,
uniform and heterogeneous. Runs go into --out and continue where they stopped. Prints mIoU in percent on seen and unseen
sequences, the mean of the evaluations in the last tenth of the rounds, mean and range over the seeds.
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
    "fedavg+swa": {"method": "fedavg+swa"},
    "fedsam": {"method": "fedavg+sam(rho=0.01)"},
    "fedsam+swa": {"method": "fedavg+sam(rho=0.01)+swa"},
    "fedasam": {"method": "fedavg+asam(rho=0.1, eta=0.2)"},
    "fedasam+swa": {"method": "fedavg+asam(rho=0.1, eta=0.2)+swa"},
    "silobn": {"method": "fedavg", "batchnorm": "silobn"},
}


def experiment(scene: str, kind: str, rounds: int, **fields: Any) -> fedflat.Experiment:
    """The setting: BiSeNetV2 of half width without auxiliary heads, 96×128, plain cross-entropy, 8 clients a round."""
    return fedflat.Experiment(
        data=f"camvid(scene={scene!r}, kind={kind!r})",
        model="bisenetv2(width=0.5, head=128, aux=False)",
        participation="uniform(8)",
        rounds=rounds,
        local_epochs=2,
        batch_size=6,
        lr=0.1,
        lr_schedule="constant",
        momentum=0.9,
        weight_decay=0.0,
        clip=None,
        evaluate_every=5,
        evaluate_clients=None,
        **fields,
    )


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    parser.add_argument("--out", default="runs/camvid")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scenes", default="dusk,carpark")
    parser.add_argument("--kinds", default="heterogeneous,uniform")
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    for scene, kind in product(given.scenes.split(","), given.kinds.split(",")):
        for name in given.methods.split(","):
            records = []
            for seed in range(given.seeds):
                e = experiment(scene, kind, given.rounds, seed=seed, **METHODS[name])
                out = Path(given.out) / f"{scene}-{kind}-{name}-s{seed}"
                records.append(record_of(fedflat.run(e, root=given.data_root, out=out, progress=False)))
            cells = []
            for metric in ("miou", "unseen_miou"):
                tails = [100 * (record.tail(metric) or 0.0) for record in records]
                cells.append(f"{fmean(tails):5.1f} ({min(tails):.1f}–{max(tails):.1f})")
            print(f"{scene:8} {kind:14} {name:12} seen {cells[0]}  unseen {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
