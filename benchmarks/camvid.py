"""Segmentation on CamVid, beside table 8 of the FedASAM paper: python benchmarks/camvid.py --data-root DIR

fedavg, fedsam and fedasam, each with and without SWA, and fedavg with SiLoBN, on the scenes *dusk* and *carpark*,
uniform and heterogeneous. Runs go into --out and continue where they stopped. Prints mIoU in percent on seen and unseen
sequences, the mean of the evaluations in the last tenth of the rounds, mean and range over the seeds. --write keeps the
figures of every finished run in a JSON file, --picture draws images with the truth and what some methods of seed 0 see.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import fedflat
from fedflat.report.page.picture_section import NOTHING, palette
from fedflat.report.png import png
from fedflat.runs.files import read_tensors
from fedflat.runs.records import Record, record_of

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
METRICS = ("miou", "unseen_miou", "accuracy", "unseen_accuracy")
SHOWN = ("fedavg", "fedasam+swa", "silobn")  # methods in the picture
GAP = 4  # pixels between pictures


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
    parser.add_argument("--write", type=Path, help="write the figures of every finished run to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw images, truth and predictions of seed 0 in this PNG file")
    given = parser.parse_args()
    cells = list(product(given.scenes.split(","), given.kinds.split(","), given.methods.split(",")))
    folders = {cell: [Path(given.out) / f"{'-'.join(cell)}-s{seed}" for seed in range(given.seeds)] for cell in cells}
    for seed, (scene, kind, name) in product(range(0 if given.table else given.seeds), cells):
        e = experiment(scene, kind, given.rounds, seed=seed, **METHODS[name], workers=given.workers)
        out = folders[scene, kind, name][seed]
        if not finished(out):  # also from benchmarks/records.py, without weights
            fedflat.run(e, root=given.data_root, out=out, progress=False)
        print(f"{out.name} is finished", flush=True)
    for cell in cells:
        print(row(cell, folders[cell]))
    if given.write:
        kept = {"-".join(cell): [found for one in folders[cell] if (found := figures(one))] for cell in cells}
        given.write.write_text(json.dumps({name: seeds for name, seeds in kept.items() if seeds}, indent=1) + "\n")
    if given.picture:
        scenes = [(scene, kind) for scene, kind, name in cells if name == SHOWN[0]]
        given.picture.write_bytes(png(np.concatenate([strip(Path(given.out), *each) for each in scenes])))


def finished(folder: Path) -> Record | None:
    """The record of a run that has all its rounds."""
    record = record_of(folder) if (folder / "experiment.toml").exists() else None
    return None if record is None or record.unfinished else record


def figures(folder: Path) -> dict[str, Any] | None:
    """Seed, tail averages, and IoU per class of the last round."""
    record = finished(folder)
    if record is None:
        return None
    tails = {metric: round(record.tail(metric) or 0.0, 5) for metric in METRICS}
    classes = {name: round(value or 0.0, 5) for name, value in record.metrics[-1].items() if "iou_" in name}
    return {"seed": record.experiment.seed, "rounds": record.rounds, **tails, "last": classes}


def strip(out: Path, scene: str, kind: str) -> np.ndarray:
    """Two seen and two unseen images below each other: image, truth, and what the methods of `SHOWN` predict."""
    kept = [read_tensors(out / f"{scene}-{kind}-{name}-s0" / "pictures.safetensors") for name in SHOWN]
    colours = np.array([NOTHING, *palette(11)], dtype=np.uint8)
    lines = []
    for test, place in product(("test", "unseen"), (0, 2)):
        image = kept[0][f"{test}/image"][place].permute(1, 2, 0).numpy()
        masks = [kept[0][f"{test}/truth"][place], *(each[f"{test}/prediction"][place] for each in kept)]
        pictures = [image.astype(np.uint8), *(colours[np.maximum(mask.numpy(), -1) + 1] for mask in masks)]
        lines.append(
            np.concatenate([np.pad(one, ((GAP, 0), (GAP, 0), (0, 0)), constant_values=255) for one in pictures], 1)
        )
    return np.concatenate(lines)


def row(cell: tuple[str, str, str], folders: list[Path]) -> str:
    """A line of the table: mean and range over the seeds that are finished."""
    records = [record for folder in folders if (record := finished(folder))]
    if not records:
        return f"{cell[0]:8} {cell[1]:14} {cell[2]:12} not run"
    figures = []
    for metric in METRICS:
        tails = [100 * (record.tail(metric) or 0.0) for record in records]
        figures.append(f"{fmean(tails):5.1f} ({min(tails):.1f}–{max(tails):.1f})")
    seen, unseen, right, right_unseen = figures
    head = f"{cell[0]:8} {cell[1]:14} {cell[2]:12} {len(records)} seeds"
    return f"{head}  mIoU seen {seen} unseen {unseen}  accuracy seen {right} unseen {right_unseen}"


if __name__ == "__main__":
    main()
