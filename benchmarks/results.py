"""The two real-data tables of docs/results.md, on CIFAR-10: run (or go on with) every cell, then print them.

    python benchmarks/results.py [const|flat] [--data-root DIR] [--out runs/results] [--jobs 2]

const: paper 004's cross-device set-up with the bias-free LeNet-5, fedavg against fedavg+const, 60 rounds.
flat:  paper 003's CIFAR-10 set-up at alpha = 0 with its CNN, fedavg, fedsam and fedasam, each with and without SWA from
       75 % on, 300 rounds instead of the paper's 10,000.

Cells run in `--jobs` processes of one worker each; whatever is finished is kept, so an interrupted call goes on. A cell
with SWA is branched off its partner where the averaging begins: until then the two runs have the same bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedflat
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
SEEDS, FLAT_SEEDS = (0, 1, 2), (0,)
SAM, ASAM, SWA = "sam(rho=0.1)", "asam(rho=0.7, eta=0.2)", "swa(start=0.75, cycle=10)"


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

    def metrics(self, out: Path) -> list[dict[str, float]]:
        """The rounds done so far."""
        path = self.folder(out) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def const_cells(seed: int) -> list[Cell]:
    """Every method on its own."""
    return [Cell("const", m, seed, CONST.replace(method=m, seed=seed)) for m in ("fedavg", "fedavg+const")]


def flat_cells(seed: int) -> list[Cell]:
    """Every method, and the same with SWA: until that begins the two runs are one."""
    cells = []
    for row, method in (("fedasam", f"fedavg+{ASAM}"), ("fedsam", f"fedavg+{SAM}"), ("fedavg", "fedavg")):
        e = FLAT.replace(method=method, seed=seed)
        start = int(0.75 * e.rounds)
        cells.append(Cell("flat", row, seed, e, branch=start))
        cells.append(Cell("flat", f"{row}+swa", seed, e.replace(method=f"{method}+{SWA}"), base=row, branch=start))
    return cells


class StopAt(fedflat.Callback):
    """Stop after a round."""

    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, run: fedflat.Run, metrics: Any) -> bool:
        """Whether it is the one."""
        return bool(metrics["round"] == self.last)


def work(cells: list[Cell], out: Path, root: str | None) -> None:
    """Run cells that depend on each other, one after the other, in this process; a cell that is done costs nothing."""
    for cell in cells:
        folder = cell.folder(out)
        if cell.base and not folder.exists():
            branch_off(cell.folder(out, cell.base), folder, cell.experiment)
        if cell.branch and not cell.base and len(cell.metrics(out)) < cell.branch:
            fedflat.run(cell.experiment, out=folder, root=root, progress=False, callbacks=[StopAt(cell.branch)])
            if not (later := next(c for c in cells if c.base == cell.row)).folder(out).exists():
                branch_off(folder, later.folder(out), later.experiment)
        fedflat.run(cell.experiment, out=folder, root=root, progress=False)


def branch_off(source: Path, target: Path, experiment: Experiment) -> None:
    """Copy a run folder under another experiment, which must agree with it so far."""
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    (temporary / "experiment.toml").write_text(experiment.to_toml())
    temporary.rename(target)


def execute(cells: list[Cell], arguments: argparse.Namespace) -> None:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--out", str(arguments.out), "--work", cells[0].table, cells[0].row]
    command += [str(cells[0].seed)] + (["--data-root", arguments.data_root] if arguments.data_root else [])
    subprocess.run(command, check=True)


def watch(cells: list[Cell], futures: list[Future[None]], out: Path) -> None:
    """Say every minute how far the cells are, until all are done."""
    while not all(future.done() for future in futures):
        done = sum(len(cell.metrics(out)) for cell in cells)
        total = sum(cell.experiment.rounds for cell in cells)
        print(f"{time.strftime('%H:%M:%S')}  {done} of {total} rounds", flush=True)
        wait(futures, timeout=60)
    for future in futures:
        future.result()


def chains(cells: list[Cell]) -> list[list[Cell]]:
    """Cells grouped with those that branch off them."""
    roots = [cell for cell in cells if not cell.base]
    same = lambda a, b: (a.table, a.seed) == (b.table, b.seed)  # noqa: E731
    return [[root, *(c for c in cells if c.base == root.row and same(c, root))] for root in roots]


def accuracies(cell: Cell, out: Path) -> list[float]:
    """The test accuracies in order, in percent."""
    return [100 * row["accuracy"] for row in cell.metrics(out) if row["accuracy"] is not None]


def table(cells: list[Cell], out: Path, tail: int = 5) -> dict[str, dict[str, float]]:
    """Last accuracy, mean of the last `tail` evaluations, best; mean and deviation over the seeds."""
    found: dict[str, dict[str, float]] = {}
    for row in dict.fromkeys(cell.row for cell in cells):
        curves = [accuracies(cell, out) for cell in cells if cell.row == row]
        figures = {
            "last": [curve[-1] for curve in curves],
            "tail": [statistics.mean(curve[-tail:]) for curve in curves],
            "best": [max(curve) for curve in curves],
        }
        found[row] = {name: round(statistics.mean(values), 2) for name, values in figures.items()}
        if len(curves) > 1:
            found[row]["last std"] = round(statistics.stdev(figures["last"]), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["const", "flat"])
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    groups = {
        "flat": [c for s in FLAT_SEEDS for c in flat_cells(s)],
        "const": [c for s in SEEDS for c in const_cells(s)],
    }
    cells = [cell for name, group in groups.items() if arguments.what in (None, name) for cell in group]
    if arguments.work:
        key = tuple(arguments.work)
        chain = next(c for c in chains(cells) if (c[0].table, c[0].row, str(c[0].seed)) == key)
        work(chain, arguments.out, arguments.data_root)
        return
    with ThreadPoolExecutor(arguments.jobs) as pool:
        watch(cells, [pool.submit(execute, chain, arguments) for chain in chains(cells)], arguments.out)
    found = {name: table(group, arguments.out) for name, group in groups.items() if group[0] in cells}
    for name, rows in found.items():
        for row, values in rows.items():
            print(f"{name:6s} {row:14s} " + "  ".join(f"{key} {value:6.2f}" for key, value in values.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
