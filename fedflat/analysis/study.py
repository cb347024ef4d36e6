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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat import streams
from fedflat.analysis.behaviour import generalisation
from fedflat.analysis.calibration import calibration
from fedflat.analysis.clients import Clients, client_table
from fedflat.analysis.curvature import curvature, spectrum
from fedflat.analysis.features import features, nearest_centroid_accuracy, silhouette
from fedflat.analysis.landscape import interpolate, landscape_1d, landscape_2d, landscape_plane
from fedflat.analysis.layers import layer_curvature
from fedflat.analysis.noise import noise_curve
from fedflat.analysis.plots import pruning_figure
from fedflat.analysis.progress import Progress
from fedflat.analysis.pruning import pruned
from fedflat.data import Federation, load_federation
from fedflat.errors import InputError, UnknownNameError
from fedflat.result import Run, load_run
from fedflat.store import write_atomically

log = logging.getLogger(__name__)
Pair = tuple[Tensor, Tensor]
Headline = dict[str, float]
CLIENTS = 5  # how many are trained further


@dataclass(frozen=True)
class Subject:
    """A run to look at: its evaluated model, and some of its training and test data as the model gets them.

    federation: all of its data. seed: of the choice of the samples.
    """

    run: Run
    model: nn.Module
    train: Pair
    test: Pair | None
    federation: Federation
    seed: int = 0

    def require_test(self, what: str) -> Pair:
        """The test data, or an error that says which analysis needs them."""
        if self.test is None:
            raise InputError(f"{what} needs test data, which the data set of {self.run.out} lacks")
        return self.test


@dataclass(frozen=True)
class Study:
    """One analysis. runs: how many it needs at once. headline: the numbers by which runs are compared."""

    about: str
    look: Callable[..., Any]
    headline: Callable[[Any], Headline]
    runs: int = 1


@dataclass(frozen=True)
class Pruned:
    """How well classes separate in the features of the model, and without a fifth of its weights (paper 004, fig. 8).

    By model ("whole", "without the smallest", "without the largest"): silhouette and nearest-centroid accuracy.
    features: rows and labels; a figure shows some of them by t-SNE where scikit-learn is installed.
    """

    silhouettes: dict[str, float]
    accuracies: dict[str, float]
    features: dict[str, Pair] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {"silhouettes": self.silhouettes, "accuracies": self.accuracies}

    def plot(self) -> Any:
        """A matplotlib figure: the features in two dimensions."""
        return pruning_figure(self)


def _pruning(subject: Subject, **options: Any) -> Pruned:
    models = {
        "whole": subject.model,
        "without the smallest": pruned(subject.model, which="bottom"),
        "without the largest": pruned(subject.model, which="top"),
    }
    found = {name: features(model, subject.train, **options) for name, model in models.items()}
    return Pruned(
        {name: silhouette(*rows) for name, rows in found.items()},
        {name: nearest_centroid_accuracy(*rows) for name, rows in found.items()},
        found,
    )


def _clients(subject: Subject, **options: Any) -> Clients:
    """Some clients, spread evenly, on as many of their samples as there are of the common training data at most."""
    federation, count = subject.federation, len(subject.train[1])
    chosen = np.unique(np.linspace(0, subject.run._server.clients - 1, CLIENTS).astype(int)).tolist()
    dtype = subject.train[0].dtype
    data = [_some(federation, [federation.samples(client)], count, subject.seed, dtype) for client in chosen]
    return client_table(subject.run, federation, chosen, data, **options)


def _sharpness(found: Any) -> Headline:
    numbers = {"λ max": found.extremes[0], "λ min": found.extremes[1], "|λmax/λmin|": found.convexity_ratio}
    numbers |= {"λ1/λ5": found.sharpness_ratio} if len(found.eigenvalues) >= 5 else {}
    return numbers | ({"trace": found.trace} if found.trace is not None else {})


def _rise(found: Any) -> Headline:
    """How much the mean loss over the picture lies above that of the model."""
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
        lambda found: {f"loss at noise {r:g}": float(v) for r, v in zip(found.ratios, found.loss, strict=True)},
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
    "pruning": Study(
        "how classes separate without the smallest and the largest weights",
        _pruning,
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
            result = STUDIES[name].look(*looked, seed=seed, workers=workers, memory=memory, progress=progress)
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


def subject(
    run: Run | str | Path,
    *,
    federation: Federation | None = None,
    root: str | Path | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> Subject:
    """A run with some of its data. federation: the data it was run on, if they were your own."""
    loaded = run if isinstance(run, Run) else load_run(run)
    if federation is None:
        e = loaded.experiment
        federation = load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)
        if loaded._inputs and loaded._inputs["data"] != federation.fingerprint():
            raise InputError(
                f"{loaded.out} was run on other data than {e.data!r} here, perhaps your own: call the functions of "
                "fedflat.analysis with them, or subject(run, federation=…)"
            )
    dtype = getattr(torch, loaded.experiment.dtype)
    test = None if federation.test is None else _some(federation, [federation.test], samples, seed, dtype)
    clients = [federation.samples(client) for client in range(len(federation))]
    train = _some(federation, clients, samples, seed, dtype)
    return Subject(loaded, loaded.model, train, test, federation, seed)


def _some(federation: Federation, sets: Sequence[Any], count: int, seed: int, dtype: torch.dtype) -> Pair:
    """A fixed random subset of all samples, in order, as the model gets them in evaluation."""
    ends = np.cumsum([len(each) for each in sets])
    stream = streams.numpy_stream(seed, "analysis")
    chosen = np.sort(stream.choice(ends[-1], min(count, int(ends[-1])), replace=False))
    owner = np.searchsorted(ends, chosen, side="right")
    xs, ys = [], []
    for place in np.unique(owner).tolist():
        positions = chosen[owner == place] - (ends[place - 1] if place else 0)
        x, y = sets[place].batch(torch.from_numpy(positions))
        xs.append(federation.preprocess(x, None, dtype))
        ys.append(y)
    return torch.cat(xs), torch.cat(ys)


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
