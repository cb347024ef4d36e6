"""How flat the minima of the runs in docs/results.md are: look at what `results.py` has run, then print the tables.

    python benchmarks/flatness.py [const|flat] [--data-root DIR] [--out runs/results]
        [--figures docs/images] [--memory GIB]

Eigenvalues and trace of the Hessian of every run, as means over the seeds. --figures also makes, of seed 0, the loss
surfaces and the spectra: the density of the eigenvalues, or of the larger network the 200 largest. What a run folder
holds already is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import TABLES, Cell

from fedflat.analysis.density import Density
from fedflat.extras import blank_figure, save_figure
from fedflat.report.figures import COLOURS, STYLES
from fedflat.studies.study import study

SAMPLES = {
    "const": {"curvature": 2000, "density": 1000, "landscape": 1000},
    "flat": {"curvature": 1000, "spectrum": 200, "landscape": 400},
}
FIGURES = {
    "λ max": lambda found: found["eigenvalues"][0],
    "λ1/λ5": lambda found: found["eigenvalues"][0] / found["eigenvalues"][4],
    "trace": lambda found: found["trace"],
    "|λmax/λmin|": lambda found: abs(found["eigenvalues"][0] / found["smallest"]),
}
FLOOR = 1e-6  # densities below this are not drawn


def looked(cell: Cell, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """An analysis of a run, made if it is not there."""
    folder = cell.folder(arguments.out)
    path = folder / "analysis" / f"{name}.json"
    if not path.exists():
        samples = SAMPLES[cell.table][name]
        options = {"root": arguments.data_root, "memory": arguments.memory}
        study([folder], [name], samples=samples, workers=0, progress=True, **options)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def show(cells: list[Cell], arguments: argparse.Namespace) -> None:
    """One row a method."""
    for row in dict.fromkeys(cell.row for cell in cells):
        found = [looked(cell, "curvature", arguments) for cell in cells if cell.row == row]
        values = {name: [figure(each) for each in found] for name, figure in FIGURES.items()}
        print(f"{cells[0].table:6s} {row:14s} " + "  ".join(f"{name} {spread(v)}" for name, v in values.items()))


def spread(values: list[float]) -> str:
    """Mean, and the deviation where there are several."""
    return f"{statistics.mean(values):.4g}" + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")


def draw(cells: list[Cell], arguments: argparse.Namespace) -> None:
    """Surfaces on one scale, and densities on one axis."""
    first = [cell for cell in cells if cell.seed == 0]
    surfaces(first, arguments, arguments.figures / f"{first[0].table}-surfaces.png")
    for name, picture in SPECTRA.items():
        if name in SAMPLES[first[0].table]:
            spectra(first, name, picture, arguments)


def surfaces(cells: list[Cell], arguments: argparse.Namespace, path: Path) -> None:
    found = {cell.row: looked(cell, "landscape", arguments) for cell in cells}
    losses = {row: np.array(each["loss"]) for row, each in found.items()}
    top = max(np.quantile(loss, 0.9) for loss in losses.values())
    rows = -(-len(cells) // 3)
    figure = blank_figure(11, 3.8 * rows)
    for place, (row, loss) in enumerate(losses.items(), start=1):
        axes = figure.add_subplot(rows, 3, place, projection="3d")
        grid = np.meshgrid(*(np.array(axis) for axis in found[row]["axes"]), indexing="ij")
        axes.plot_surface(*grid, np.minimum(loss, top), cmap="viridis", vmin=0, vmax=top, rstride=1, cstride=1)
        axes.set_zlim(0, top)
        axes.set_title(f"{row}: {loss[loss.shape[0] // 2, loss.shape[1] // 2]:.2f} in the middle", fontsize=10)
    save_figure(figure, path)


def spectra(cells: list[Cell], name: str, picture: Picture, arguments: argparse.Namespace) -> None:
    """All runs' spectra on one scale: below each other, or on one pair of axes."""
    figure = blank_figure(8, 1.5 * len(cells) if picture.apart else 3.6)
    panels = figure.subplots(len(cells) if picture.apart else 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for place, cell in enumerate(cells):
        axes = panels[place if picture.apart else 0]
        x, y = picture.curve(looked(cell, name, arguments))
        style = "-" if picture.apart else STYLES[place % len(STYLES)]
        axes.semilogy(x, y, label=cell.row, color=COLOURS[place], linestyle=style)
        axes.legend(frameon=False, loc="upper right")
        axes.set_ylabel(picture.y)
    panels[-1].set_xlabel(picture.x)
    save_figure(figure, arguments.figures / f"{cells[0].table}-{name}.png")


def density(found: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The density over the eigenvalues."""
    rule = Density.of(torch.tensor(found["density"]["nodes"]), torch.tensor(found["density"]["weights"]))
    return rule.grid.numpy(), rule.values.clamp_min(FLOOR).numpy()


def ranked(found: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The positive ones of the largest eigenvalues, by rank."""
    values = np.array([value for value in found["eigenvalues"] if value > 0])
    return np.arange(1, len(values) + 1), values


@dataclass(frozen=True)
class Picture:
    """How to draw a spectrum."""

    curve: Callable[[dict[str, Any]], tuple[np.ndarray, np.ndarray]]
    x: str
    y: str
    apart: bool = False


SPECTRA = {
    "density": Picture(density, "eigenvalue", "density", apart=True),
    "spectrum": Picture(ranked, "rank", "eigenvalue"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=list(SAMPLES))
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--memory", metavar="GIB", type=float, default=2.0)
    arguments = parser.parse_args()
    for name in [arguments.what] if arguments.what else SAMPLES:
        show(TABLES[name], arguments)
        if arguments.figures:
            draw(TABLES[name], arguments)


if __name__ == "__main__":
    main()
