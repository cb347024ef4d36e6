"""The real-data tables of docs/results.md: run (or go on with) every cell, then print them.

    python benchmarks/results.py [const|flat|local|personal] [--data-root DIR] [--out runs/results] [--jobs 2]

const:    the FedCONST paper's cross-device set-up with the bias-free LeNet-5, fedavg against fedavg+const, 60 rounds.
flat:     FedASAM's CIFAR-10 set-up at alpha = 0 with its CNN, fedavg, fedsam and fedasam, each with and without SWA
          from 75 % on, 300 rounds instead of the paper's 10,000.
local:    FedAlign's CIFAR-100 set-up with a small member of ResNet-56's family, fedavg and four local regularisers, at
          equal rounds and at equal compute.
personal: the PLGU paper's CIFAR-10 set-up with LeNet-5, common and personal models, mean and tails over the clients.

Cells run in `--jobs` processes of one worker each; whatever is finished is kept, so an interrupted call goes on. A cell
with SWA is branched off its partner where the averaging begins: until then the two runs have the same bits.
--figures DIR also writes the curves, and for `personal` the distribution over the clients, as pictures.
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
from pathlib import Path
from typing import Any

from tables import TABLES, Cell

import fedflat
from fedflat.experiment import Experiment

Figures = dict[str, float]


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


def table(cells: list[Cell], out: Path) -> dict[str, Figures]:
    """One row a method: means over its seeds, and their deviation."""
    found: dict[str, Figures] = {}
    for row in dict.fromkeys(cell.row for cell in cells):
        seeds = [figures(cell, cells, out) for cell in cells if cell.row == row]
        found[row] = {name: round(statistics.mean(seed[name] for seed in seeds), 2) for name in seeds[0]}
        if len(seeds) > 1:
            found[row]["last std"] = round(statistics.stdev(seed["last"] for seed in seeds), 2)
    return found


def figures(cell: Cell, cells: list[Cell], out: Path, tail: int = 5) -> Figures:
    """Last accuracy, mean of the last `tail` evaluations, best; and what the table has of its own."""
    curve = accuracies(cell, out)
    losses = [row["loss"] for row in cell.metrics(out) if row["loss"] is not None]
    found: Figures = {}
    if curve:  # methods that part the network have no common model
        found |= {"last": curve[-1], "tail": statistics.mean(curve[-tail:]), "best": max(curve)}
        found |= {"tail std": statistics.stdev(curve[-tail:]), "tail loss": statistics.mean(losses[-tail:])}
    if cell.table == "local":
        found |= at_equal_compute(cell, curve, cells)
    if cell.table == "personal":
        last = cell.metrics(out)[-1]
        wanted = [f"{who}_{name}" for who in ("clients", "personal") for name in ("mean", "low5", "top5")]
        found |= {name: 100 * last[name] for name in wanted if name in last}
    return found


def at_equal_compute(cell: Cell, curve: list[float], cells: list[Cell]) -> Figures:
    """The accuracy when as many multiplications were done as fedavg does in all its rounds."""
    from fedflat.cost import cost_of

    macs = {c.row: cost_of(c.experiment, (3, 32, 32), 100).macs for c in cells if c.row in (cell.row, "fedavg")}
    ratio = macs[cell.row] / macs["fedavg"]
    return {"compute": ratio, "equal compute": curve[min(len(curve), max(1, int(len(curve) / ratio + 1e-9))) - 1]}


def draw(cells: list[Cell], out: Path, folder: Path) -> None:
    """The curves of a table, and the clients' distribution where it has one."""
    from fedflat.report.figures import curves, distribution

    folder.mkdir(parents=True, exist_ok=True)
    runs = [cell.folder(out) for cell in cells if cell.seed == 0]
    curves(runs, folder / f"{cells[0].table}.png")
    if cells[0].table == "personal":
        distribution(runs, folder / "personal-clients.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=list(TABLES))
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    groups = {name: group for name, group in TABLES.items() if arguments.what in (None, name)}
    cells = [cell for group in groups.values() for cell in group]
    if arguments.work:
        key = tuple(arguments.work)
        chain = next(c for c in chains(cells) if (c[0].table, c[0].row, str(c[0].seed)) == key)
        work(chain, arguments.out, arguments.data_root)
        return
    with ThreadPoolExecutor(arguments.jobs) as pool:
        watch(cells, [pool.submit(execute, chain, arguments) for chain in chains(cells)], arguments.out)
    found = {name: table(group, arguments.out) for name, group in groups.items()}
    for name, rows in found.items():
        for row, values in rows.items():
            print(f"{name:8s} {row:14s} " + "  ".join(f"{key} {value:6.2f}" for key, value in values.items()))
        if arguments.figures:
            draw(groups[name], arguments.out, arguments.figures)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
