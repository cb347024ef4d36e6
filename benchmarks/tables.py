"""The cells of the tables in docs/results.md: which runs they are made of. `results.py` runs and prints them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.experiment import Experiment

CONST = Experiment(
    data="cifar10",
    partition="dirichlet_over_clients(alpha=0.5)",
    participation="uniform(10)",
    model="lenet5",
    rounds=60,
    local_epochs=5,
    batch_size=50,
    lr=0.01,
    lr_decay=1.0,
    momentum=0.9,
    weight_decay=1e-5,
    clip=None,
    augment="paper004",
    local_holdout=0.1,
    evaluate_every=2,
    workers=1,
)
FLAT = Experiment(
    data="cifar10",
    partition="lda_hsu(alpha=0)",
    participation="uniform(5)",
    model="cnn64",
    rounds=300,
    local_epochs=1,
    batch_size=64,
    lr=0.01,
    lr_decay=1.0,
    weight_decay=4e-4,
    clip=None,
    augment="paper003",
    evaluate_every=10,
    workers=1,
)
LOCAL = Experiment(
    data="cifar100",
    partition="dirichlet_per_class(alpha=0.5)",
    clients=16,
    participation="uniform(4)",
    model="resnet56(blocks=2, width=8)",
    rounds=12,
    local_epochs=2,
    batch_size=64,
    lr=0.01,
    lr_decay=1.0,
    momentum=0.9,
    nesterov=True,
    weight_decay=1e-4,
    clip=10.0,
    augment="paper001",
    evaluate_every=1,
    evaluate_clients=None,
    workers=1,
)
PERSONAL = Experiment(
    data="cifar10",
    partition="pathological(labels=3)",
    participation="uniform(10)",
    model="lenet5(bias=True)",
    rounds=100,
    local_epochs=5,
    batch_size=50,
    lr=0.01,
    lr_decay=1.0,
    weight_decay=0.0,
    augment="none",
    evaluate_every=10,
    evaluate_clients=50,
    workers=1,
)
SAM, ASAM, SWA = "sam(rho=0.1)", "asam(rho=0.7, eta=0.2)", "swa(start=220, cycle=10)"
REGULARISERS = {
    "fedavg": "fedavg",
    "mixup": "fedavg+mixup(gamma=0.1)",
    "stochdepth": "fedavg+stochdepth(keep=0.9)",
    "gradaug": "fedavg+gradaug(mu=1.75, n=2, width=0.8)",
    "fedalign": "fedavg+fedalign(mu=0.45, width=0.25)",
}
PERSONALISERS = {
    "fedavg": "fedavg",
    "fedsam": "fedavg+sam(rho=0.05)",
    "ditto": "ditto(lam=1.0)",
    "pfedme": "pfedme(lam=15, steps=5, lr=0.01, beta=1.0)",
    "fedrep": "fedrep(head_epochs=5, body_epochs=1)",
    "fedrep-10+5": "fedrep(head_epochs=10, body_epochs=5)",
    "pfedhn": "pfedhn(depth=2)",
    "plgu_lf": "plgu_lf(rho=0.05, layers=3)",
    "plgu_lf-mean": 'plgu_lf(rho=0.05, layers=3, score="mean")',
    "plgu_grep": "plgu_grep(rho=0.05)",
    "plgu_grep-mean": 'plgu_grep(rho=0.05, score="mean")',
    "plgu_ghn": "plgu_ghn(rho=0.05)",
    "plgu_ghn-mean": 'plgu_ghn(rho=0.05, score="mean")',
}


@dataclass(frozen=True)
class Cell:
    """One run: where it stands in the tables, and what it is.

    base: a cell with which it agrees up to `branch` rounds; it starts as a copy of that one at this round.
    """

    table: str
    row: str
    seed: int
    experiment: Experiment
    base: str = ""
    branch: int = 0

    def folder(self, out: Path, row: str = "") -> Path:
        """Where it is written."""
        return out / self.table / f"{row or self.row}-s{self.seed}"

    def metrics(self, out: Path) -> list[dict[str, Any]]:
        """The rounds done so far."""
        path = self.folder(out) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _flat(seed: int) -> list[Cell]:
    """Every method, and the same with SWA: until that begins the two runs are one."""
    cells = []
    for row, method in (("fedasam", f"fedavg+{ASAM}"), ("fedsam", f"fedavg+{SAM}"), ("fedavg", "fedavg")):
        e = FLAT.replace(method=method, seed=seed)
        start = 220  # 75 % is 225, which the cycle of 10 does not divide
        cells.append(Cell("flat", row, seed, e, branch=start))
        cells.append(Cell("flat", f"{row}+swa", seed, e.replace(method=f"{method}+{SWA}"), base=row, branch=start))
    return cells


def _each(table: str, setup: Experiment, methods: dict[str, str], seeds: tuple[int, ...]) -> list[Cell]:
    """Every method on its own."""
    return [
        Cell(table, row, seed, setup.replace(method=method, seed=seed))
        for seed in seeds
        for row, method in methods.items()
    ]


TABLES: dict[str, list[Cell]] = {
    "flat": _flat(0),
    "const": _each("const", CONST, {method: method for method in ("fedavg", "fedavg+const", "fedavg+man")}, (0, 1, 2)),
    "local": _each("local", LOCAL, REGULARISERS, (0,)),
    "personal": _each("personal", PERSONAL, PERSONALISERS, (0,)),
}
