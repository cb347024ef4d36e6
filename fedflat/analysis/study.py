"""Analyses of runs by name: what `fedflat analyze` does, for Python.

>>> from fedflat.analysis.study import STUDIES
>>> "curvature" in STUDIES
True
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.analysis.behaviour import generalisation
from fedflat.analysis.calibration import calibration
from fedflat.analysis.clients import Clients, client_table
from fedflat.analysis.curvature import curvature, spectrum
from fedflat.analysis.landscape import interpolate, landscape_1d, landscape_2d, landscape_plane
from fedflat.analysis.layers import layer_curvature
from fedflat.analysis.noise import noise_curve
from fedflat.analysis.progress import Progress
from fedflat.analysis.pruning import pruned_features
from fedflat.analysis.rounds import accuracy_over_rounds
from fedflat.analysis.subject import Subject, some, subject
from fedflat.errors import InputError, UnknownNameError
from fedflat.result import Run
from fedflat.store import write_atomically

log = logging.getLogger(__name__)
Headline = dict[str, float]
CLIENTS = 5  # how many are trained further


@dataclass(frozen=True)
class Study:
    """One analysis. runs: how many it needs at once. headline: the numbers by which runs are compared."""

    about: str
    look: Callable[..., Any]
    headline: Callable[[Any], Headline]
    runs: int = 1


def _clients(subject: Subject, **options: Any) -> Clients:
    """Some clients, spread evenly, on as many of their samples as there are of the common training data at most."""
    federation, count = subject.federation, len(subject.train[1])
    chosen = np.unique(np.linspace(0, subject.run._server.clients - 1, CLIENTS).astype(int)).tolist()
    dtype = subject.train[0].dtype
    data = [some(federation, [federation.samples(client)], count, subject.seed, dtype) for client in chosen]
    return client_table(subject.run, federation, chosen, data, **options)


def _sharpness(found: Any) -> Headline:
    numbers = {"λ max": found.extremes[0], "λ min": found.extremes[1], "|λmax/λmin|": found.convexity_ratio}
    numbers |= {"λ1/λ5": found.sharpness_ratio} if len(found.eigenvalues) >= 5 else {}
    return numbers | ({"trace": found.trace} if found.trace is not None else {})


def _rise(found: Any) -> Headline:
    """Lowest and mean loss over the picture."""
    values = found.loss.flatten()
    return {"loss, lowest": float(values.min()), "loss, mean": float(values.mean())}


STUDIES: dict[str, Study] = {
    "curvature": Study(
        "extreme eigenvalues and trace of the Hessian",
        lambda s, **options: curvature(s.model, s.train, k=5, **options),
        _sharpness,
    ),
    "density": Study(
        "its spectral density",
        lambda s, **options: curvature(s.model, s.train, k=5, trace=False, density=True, **options),
        _sharpness,
    ),
    "spectrum": Study(
        "its 200 largest eigenvalues", lambda s, **options: spectrum(s.model, s.train, **options), _sharpness
    ),
    "layers": Study(
        "curvature of every layer, beside what enters it",
        lambda s, **options: layer_curvature(s.model, s.train, **options),
        lambda found: {"largest λ max of a layer": max(row.largest for row in found.rows)},
    ),
    "landscape": Study(
        "loss over two random directions, normalised by filter",
        lambda s, **options: landscape_2d(s.model, s.train, points=21, test=s.test, **options),
        _rise,
    ),
    "line": Study(
        "loss along one such direction",
        lambda s, **options: landscape_1d(s.model, s.train, test=s.test, **options),
        _rise,
    ),
    "eigenplane": Study(
        "loss over the two sharpest directions",
        lambda s, **options: landscape_2d(s.model, s.train, direction="eigen", points=21, test=s.test, **options),
        _rise,
    ),
    "noise": Study(
        "loss under Gaussian noise of growing size on the weights",
        lambda s, **options: noise_curve(s.model, s.train, **options),
        lambda found: {f"loss at noise {r / 10}": float(found.loss[r]) for r in (0, 2, 5, 10)},
    ),
    "calibration": Study(
        "confidence against accuracy on the test data",
        lambda s, **options: calibration(s.model, s.require_test("calibration"), **options),
        lambda found: {"calibration error": found.error},
    ),
    "generalisation": Study(
        "training against test data",
        lambda s, **options: generalisation(s.model, s.train, s.require_test("generalisation"), **options),
        lambda found: {"loss gap": found.loss_gap, "accuracy gap": found.accuracy_gap},
    ),
    "rounds": Study(
        "accuracy over the rounds as recorded: tail average, and what clients forget",
        lambda s, **options: accuracy_over_rounds(s.run),
        lambda found: {
            "final accuracy": found.final,
            "best": found.best,
            "last 100 rounds": found.tail,
            "forgotten by clients": found.mean_forgotten,
        },
    ),
    "pruning": Study(
        "how classes separate without the smallest and the largest weights",
        lambda s, **options: pruned_features(s.model, s.train, **options),
        lambda found: {f"silhouette, {name}": value for name, value in found.silhouettes.items()},
    ),
    "clients": Study(
        f"{CLIENTS} clients after one round more: gradient signal, how alike their curvature is, barriers between them",
        _clients,
        lambda found: {
            "Σr, first step": float(np.mean(found.first)),
            "Σr, last step": float(np.mean(found.last)),
            "H_N": found.curvature.norm,
            "H_D": found.curvature.direction,
            "highest barrier": float(found.lines.barrier.max()),
        },
    ),
    "interpolation": Study(
        "loss on the line between two runs' models",
        lambda a, b, **options: interpolate(a.model, b.model, a.train, test=a.test, **options),
        _rise,
        runs=2,
    ),
    "plane": Study(
        "loss in the plane through three runs' models",
        lambda a, b, c, **options: landscape_plane(a.model, b.model, c.model, a.train, test=a.test, **options),
        _rise,
        runs=3,
    ),
}


def study(
    runs: Sequence[Run | str | Path],
    what: Sequence[str] = ("curvature",),
    *,
    root: str | Path | None = None,
    samples: int = 2000,
    seed: int = 0,
    workers: int = 1,
    memory: float = 2.0,
    progress: Progress = False,
    write: bool = True,
) -> dict[str, dict[str, Headline]]:
    """Look at runs: {analysis: {run: headline numbers}}.

    what: names of `STUDIES`. root: where data sets lie. samples: how many of the training data, and of the test data,
    are looked at; the same ones for all runs of a seed. workers, memory, progress: see `Protocol`. write: put tables
    (JSON, CSV) and figures (PNG, SVG) into a folder `analysis` of the run; of analyses of several runs, into that of
    the first.
    """
    if not what:
        raise InputError(f"name the analyses to make: {', '.join(STUDIES)}")
    for name in what:
        if name not in STUDIES:
            raise UnknownNameError("analysis", name, STUDIES)
        needed = STUDIES[name].runs
        if needed > 1 and len(runs) != needed:
            raise InputError(f"{name} looks at {needed} runs together, not at {len(runs)}: name {needed} run folders")
    if samples < 1:
        raise InputError(f"samples must be 1 or more, got {samples}")
    subjects = [subject(run, root=root, samples=samples, seed=seed) for run in runs]
    pairs = list(zip(_labels(runs), subjects, strict=True))
    found: dict[str, dict[str, Headline]] = {}
    for name in what:
        for group in [pairs] if STUDIES[name].runs > 1 else [[pair] for pair in pairs]:
            looked = [one for _, one in group]
            options = {"loss": looked[0].run._task.criterion, "seed": seed, "workers": workers, "memory": memory}
            result = STUDIES[name].look(*looked, progress=progress, **options)
            headline = STUDIES[name].headline(result)
            names = [label for label, _ in group]
            found.setdefault(name, {})[" / ".join(names)] = headline
            first = looked[0].run.out
            if write and first is not None:
                store(first / "analysis", name, result, headline, names)
    return found


def _labels(runs: Sequence[Run | str | Path]) -> list[str]:
    """The folder's name of each run; its whole path where another has the same name."""
    paths = [run.out if isinstance(run, Run) else Path(run) for run in runs]
    names = [path.name if path else "in memory" for path in paths]
    return [str(path) if path and names.count(path.name) > 1 else name for path, name in zip(paths, names, strict=True)]


def store(folder: Path, name: str, result: Any, headline: Headline, runs: Sequence[str]) -> None:
    """Write a result as JSON with the names of its runs, its headline into `summary.csv`, its figure as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"runs": list(runs), **result.to_dict()}
    write_atomically(folder / f"{name}.json", (json.dumps(content, indent=1) + "\n").encode())
    _update(folder / "summary.csv", name, headline)
    if hasattr(result, "plot"):
        try:
            figure = result.plot()
        except InputError as error:  # a package is missing: the numbers are written all the same
            log.warning("no figure of %s: %s", name, error)
            return
        for suffix in ("png", "svg"):
            figure.savefig(folder / f"{name}.{suffix}")


def _update(path: Path, name: str, headline: Headline) -> None:
    rows = [row for row in csv.reader(path.read_text().splitlines()[1:]) if row[0] != name] if path.exists() else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("analysis", "figure", "value"))
    writer.writerows([*rows, *((name, figure, repr(value)) for figure, value in headline.items())])
    write_atomically(path, text.getvalue().encode())
