"""Segmentation on CamVid, beside table 8 of the FedASAM paper: python benchmarks/camvid.py --data-root DIR

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

SWA = "swa(start=0.75, cycle=5, lr_min=0.001)"
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg+swa": {"method": f"fedavg+{SWA}"},
    "fedsam": {"method": "fedavg+sam(rho=0.01)"},
    "fedsam+swa": {"method": f"fedavg+sam(rho=0.01)+{SWA}"},
    "fedasam": {"method": "fedavg+asam(rho=0.1, eta=0.2)"},
    "fedasam+swa": {"method": f"fedavg+asam(rho=0.1, eta=0.2)+{SWA}"},
    "silobn": {"method": "fedavg", "batchnorm": "silobn"},
    "silobn_by_domain": {"method": "fedavg", "batchnorm": "silobn_by_domain"},
}


def experiment(scene: str, kind: str, rounds: int, **fields: Any) -> fedflat.Experiment:
    """The setting: BiSeNetV2 of half width without auxiliary heads, 96×128, plain cross-entropy, 8 clients per round.

    An average of weights has no BatchNorm statistics of its own, so those of all methods but SiLoBN are estimated anew
    for the evaluated weights; training does not see them.
    """
    return fedflat.Experiment(
        data=f"camvid(scene={scene!r}, kind={kind!r})",
        model="bisenetv2(width=0.5, head=128, aux=False)",
        participation="uniform(8)",
        rounds=rounds,
        local_epochs=2,
        batch_size=6,
        drop_last=True,  # a client of 13 images would end with a batch of one, which BatchNorm refuses
        lr=0.1,
        lr_schedule="constant",
        momentum=0.9,
        weight_decay=0.0,
        clip=None,
        evaluate_every=5,
        evaluate_clients=None,
        **{"batchnorm": "recompute", **fields},
    )


def main() -> None:
    """Run what is missing, one seed after the other, and print the table of what is finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    parser.add_argument("--out", default="runs/camvid")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scenes", default="dusk,carpark")
    parser.add_argument("--kinds", default="heterogeneous,uniform")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--workers", type=int, help="worker processes; by default one per core")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is finished")
    given = parser.parse_args()
    cells = list(product(given.scenes.split(","), given.kinds.split(","), given.methods.split(",")))
    folders = {cell: [Path(given.out) / f"{'-'.join(cell)}-s{seed}" for seed in range(given.seeds)] for cell in cells}
    for seed, (scene, kind, name) in product(range(0 if given.table else given.seeds), cells):
        e = experiment(scene, kind, given.rounds, seed=seed, **METHODS[name], workers=given.workers)
        out = folders[scene, kind, name][seed]
        fedflat.run(e, root=given.data_root, out=out, progress=False)
        print(f"{out.name} is finished", flush=True)
    for cell in cells:
        print(row(cell, folders[cell]))


def row(cell: tuple[str, str, str], folders: list[Path]) -> str:
    """A line of the table: mean and range over the seeds that are finished."""
    records = [record_of(folder) for folder in folders if (folder / "experiment.toml").exists()]
    records = [record for record in records if not record.unfinished]
    if not records:
        return f"{cell[0]:8} {cell[1]:14} {cell[2]:12} not run"
    figures = []
    for metric in ("miou", "unseen_miou", "accuracy", "unseen_accuracy"):
        tails = [100 * (record.tail(metric) or 0.0) for record in records]
        figures.append(f"{fmean(tails):5.1f} ({min(tails):.1f}–{max(tails):.1f})")
    seen, unseen, right, right_unseen = figures
    head = f"{cell[0]:8} {cell[1]:14} {cell[2]:12} {len(records)} seeds"
    return f"{head}  mIoU seen {seen} unseen {unseen}  accuracy seen {right} unseen {right_unseen}"


if __name__ == "__main__":
    main()
