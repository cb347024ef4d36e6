"""Accuracy on corrupted images of models trained here: python benchmarks/robustness.py --data-root DIR

Trains fedavg, fedasam, fedasam with SWA, fedavg with MAN and fedavg with CONST on a fifth of CIFAR-10, three seeds
each. Runs go into --out and continue where they stopped. Then 19 corruptions of severity 5 of the whole test set, as
`fedflat analyze RUN… --what corruptions --samples 10000` makes them. Prints a table, and writes it with the accuracy
per corruption and seed to --table and the figure to --figure.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import fedflat
from fedflat.analysis.corruptions import Corruptions, corruptions_figure
from fedflat.extras import save_figure
from fedflat.report.significance import ENOUGH, paired
from fedflat.studies.study import study
from fedflat.words import with_spread

METHODS = {
    "fedavg": "fedavg",
    "fedasam": "fedavg+asam",
    "fedasam+swa": "fedavg+asam+swa(start=0.75, cycle=5)",
    "fedavg+man": "fedavg+man",
    "fedavg+const": "fedavg+const",
}
BASE, SEVERITY, TEST_SET, SURE = "fedavg", 5, 10_000, 0.05
HEADS = ("clean", "mean", "drop")
Seeds = dict[str, list[Corruptions]]


def experiment(method: str, seed: int, **fields: Any) -> fedflat.Experiment:
    """The leaderboard's setting of CIFAR-10, with the package's default hyper-parameters; nothing was searched."""
    return fedflat.Experiment(
        data="cifar10(share=0.2)",
        partition="dirichlet_equal(delta=0.6)",
        model="cnn64(width=16)",
        augment="paper003",
        method=method,
        seed=seed,
        clients=100,
        participation="uniform(10)",
        rounds=200,
        local_epochs=2,
        batch_size=20,
        lr=0.1,
        lr_decay=0.998,
        weight_decay=1e-3,
        clip=10.0,
        evaluate_every=10,
        evaluate_clients=0,
        **fields,
    )


def main() -> None:
    """Run what is missing, analyse what is not analysed yet, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, default=Path("runs/corruptions"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="worker processes; by default one per core")
    parser.add_argument("--table", type=Path, help="write the table to this JSON file")
    parser.add_argument("--figure", type=Path, help="draw methods beside each other in this file")
    given = parser.parse_args()
    found: Seeds = {name: [] for name in METHODS}
    for seed in range(given.seeds):
        for name, method in METHODS.items():
            folder, e = given.out / f"{name}-s{seed}", experiment(method, seed, workers=given.workers)
            fedflat.run(e, root=given.data_root, out=folder, progress=False)
            found[name].append(looked_at(folder, given.data_root))
            print(f"{folder.name}: clean {found[name][-1].clean:.3f}, mean {found[name][-1].mean:.3f}", flush=True)
    for name in METHODS:
        print(row(found, name))
    if given.table:
        given.table.write_text(json.dumps(table(found), indent=1) + "\n")
    if given.figure:
        save_figure(corruptions_figure(found), given.figure)


def looked_at(folder: Path, root: str | None) -> Corruptions:
    """The analysis of a run; made if it is not there."""
    kept = folder / "analysis" / "corruptions.json"
    if not kept.exists():
        study([folder], ["corruptions"], root=root, samples=TEST_SET, severity=SEVERITY)
    stored = json.loads(kept.read_text())
    names = ("clean", "accuracy", "severities", "samples", "faith", "group")
    return Corruptions(*(stored[name] for name in names))


def chance(found: Seeds, name: str, head: str) -> float | None:
    """The p-value of the paired t-test against the base method, seed by seed; None with too few seeds."""
    ours, theirs = ([getattr(one, head) for one in found[each]] for each in (name, BASE))
    return None if name == BASE or len(ours) < ENOUGH else paired(ours, theirs).p


def row(found: Seeds, name: str) -> str:
    """A line of the table, in percent; "=" marks what cannot be told from the base method."""
    cells = []
    for head in HEADS:
        p = chance(found, name, head)
        sign = "" if p is None else "=" if p >= SURE else "≠"
        cells.append(f"{head} {with_spread([100 * getattr(one, head) for one in found[name]])} {sign}")
    return f"{name:14} {len(found[name])} seeds  " + "  ".join(cells)


def table(found: Seeds) -> dict[str, Any]:
    """Every figure by seed, and the p-values against the base method."""
    return {
        name: {head: [round(getattr(one, head), 5) for one in seeds] for head in HEADS}
        | {"p": {head: chance(found, name, head) for head in HEADS}}
        | {"by_corruption": {c: [round(one.by_corruption[c], 5) for one in seeds] for c in seeds[0].accuracy}}
        | {"mean_of_all": round(fmean(one.mean for one in seeds), 5)}
        for name, seeds in found.items()
    }


if __name__ == "__main__":
    main()
