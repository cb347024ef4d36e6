"""Named analyses of runs, as in `fedflat analyze`.

>>> from fedflat.studies.study import STUDIES
>>> "curvature" in STUDIES
True
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedflat.analysis.behaviour import generalisation
from fedflat.analysis.calibration import calibration
from fedflat.analysis.corrupted import CORRUPTIONS, Corruption
from fedflat.analysis.corruptions import corruptions, corruptions_figure
from fedflat.analysis.curvature import curvature, spectrum
from fedflat.analysis.ice import photographed_frost
from fedflat.analysis.landscape import interpolate, landscape_1d, landscape_2d, landscape_plane
from fedflat.analysis.layer_curvature import layer_curvature
from fedflat.analysis.noise import noise_curve
from fedflat.analysis.progress import Progress
from fedflat.analysis.pruning import pruned_features
from fedflat.core.devices import home_of, resolve_one
from fedflat.data import Federation
from fedflat.data.preprocess import Preprocess
from fedflat.data.sources import data_root
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import slug
from fedflat.runs.files import write_atomically
from fedflat.runs.result import Run
from fedflat.studies.clients import Clients, client_table, local_models
from fedflat.studies.rounds import accuracy_over_rounds
from fedflat.studies.run_data import RunData, client_data, run_data, some

log = logging.getLogger(__name__)
Headline = dict[str, float]
PUBLISHED = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}  # data set → folder of its corrupted test images
CLIENTS = 5  # number of clients that train for one more round


@dataclass(frozen=True)
class Study:
    """One analysis.

    Attributes:
        about: A short description.
        look: Computes the result from one `RunData` per run and the options of `Protocol`.
        headline: Takes from a result the numbers by which runs are compared.
        runs: Number of runs that it analyses together.
        takes: Names of the options of `study` that it takes besides those of `Protocol`.
        detail: Takes from a result further numbers, of which a terminal shows one row each.
        together: Draws the results of several runs, by their names, in one figure.
    """

    about: str
    look: Callable[..., Any]
    headline: Callable[[Any], Headline]
    runs: int = 1
    takes: tuple[str, ...] = ()
    detail: Callable[[Any], Headline] | None = None
    together: Callable[[Mapping[str, Any]], Any] | None = None


def _clients(data: RunData, **options: Any) -> Clients:
    """Compare evenly spaced clients, each on at most as many of its samples as `data.train` has."""
    federation, count = data.federation, len(data.train[1])
    chosen = np.unique(np.linspace(0, data.run._state.server.clients - 1, CLIENTS).astype(int)).tolist()
    dtype = data.run._state.server.theta.dtype
    own = [some(federation, [federation.samples(client)], count, data.seed, dtype) for client in chosen]
    return client_table(data.run, federation, chosen, own, data.device, **options)


def _local_plane(data: RunData, **options: Any) -> Any:
    """Loss in the plane through three clients' models after one more round (FedASAM paper, figs. 2 and 12)."""
    federation, clients = data.federation, data.run._state.server.clients
    if clients < 3:
        raise InputError(f"local_plane needs three clients, but the run has {clients}")
    chosen = np.linspace(0, clients - 1, 3).astype(int).tolist()
    one, two, three = local_models(data.run, federation, chosen, data.device)
    return landscape_plane(one, two, three, data.train, test=data.test, **options)


def _corruptions(data: RunData, root: str | Path | None = None, **options: Any) -> Any:
    """Accuracy on corrupted test images (FedASAM paper, figs. 6 and 8), from the published files where they are."""
    recipe, federation = data.federation.preprocess, data.federation
    if not isinstance(recipe, Preprocess):
        raise InputError(f"corruptions need images, which the data of {data.run.out} are not")
    images, count = data.raw_test("corruptions"), len(data.require_test("corruptions")[1])
    folder = data_root(root) / PUBLISHED.get(federation.name, "none")
    there = federation.name in PUBLISHED and data.test_set is federation.test and folder.is_dir()
    options |= {"preprocess": recipe, "published": folder if there else None, "max_samples": count}
    return corruptions(data.model, images, table=_with_ice(data_root(root)), **options)


def _with_ice(root: Path) -> Mapping[str, Corruption]:
    """The corruptions, with frost from the photographs of ice if the data root has them."""
    folders = [root / name / "frost" for name in (*PUBLISHED.values(), "CIFAR-10-C-sample")]
    found = next((folder for folder in folders if folder.is_dir()), None)
    return CORRUPTIONS | ({"frost": photographed_frost(found)} if found else {})


def _sharpness(found: Any) -> Headline:
    numbers = {"λ max": found.extremes[0], "λ min": found.extremes[1], "|λmax/λmin|": found.convexity_ratio}
    numbers |= {"λ1/λ5": found.sharpness_ratio} if len(found.eigenvalues) >= 5 else {}
    return numbers | ({"trace": found.trace} if found.trace is not None else {})


def _rise(found: Any) -> Headline:
    """Lowest and mean loss over the landscape."""
    values = found.loss.flatten()
    return {"loss, lowest": float(values.min()), "loss, mean": float(values.mean())}


STUDIES: dict[str, Study] = {
    "curvature": Study(
        "extreme eigenvalues and trace of the Hessian",
        lambda s, **options: curvature(s.model, s.train, k=5, **options),
        _sharpness,
    ),
    "density": Study(
        "spectral density of the Hessian",
        lambda s, **options: curvature(s.model, s.train, k=5, trace=False, density=True, **options),
        _sharpness,
    ),
    "spectrum": Study(
        "200 largest eigenvalues of the Hessian",
        lambda s, **options: spectrum(s.model, s.train, **options),
        _sharpness,
    ),
    "layers": Study(
        "curvature of every layer, and the norm of its input",
        lambda s, **options: layer_curvature(s.model, s.train, **options),
        lambda found: {"largest λ max of a layer": max(row.largest for row in found.rows)},
    ),
    "landscape": Study(
        "loss over two random directions, normalised by filter",
        lambda s, **options: landscape_2d(s.model, s.train, points=21, test=s.test, **options),
        _rise,
    ),
    "line": Study(
        "loss along one random direction, normalised by filter",
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
    "corruptions": Study(
        "accuracy on test images with noise, blur, weather and digital damage",
        _corruptions,
        lambda found: {"clean": found.clean, "corrupted": found.mean, "drop": found.drop, **found.by_group},
        takes=("severity", "root"),
        detail=lambda found: {f"{name}, {found.faith[name]}": value for name, value in found.by_corruption.items()},
        together=lambda found: corruptions_figure({name: [one] for name, one in found.items()}),
    ),
    "generalisation": Study(
        "training against test data",
        lambda s, **options: generalisation(s.model, s.train, s.require_test("generalisation"), **options),
        lambda found: {"loss gap": found.loss_gap, "accuracy gap": found.accuracy_gap},
    ),
    "rounds": Study(
        "recorded accuracy over the rounds: tail average, and how much clients forget",
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
        f"{CLIENTS} clients after one more round: gradient signal, similarity of curvature, barriers between models",
        _clients,
        lambda found: {
            "Σr, first step": float(np.mean(found.first)),
            "Σr, last step": float(np.mean(found.last)),
            "H_N": found.curvature.norm,
            "H_D": found.curvature.direction,
            "highest barrier": float(found.lines.barrier.max()),
        },
    ),
    "local_plane": Study(
        "loss in the plane through the models of three clients after one more round",
        _local_plane,
        _rise,
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
    out: str | Path | None = None,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    client: int | None = None,
    severity: int = 5,
    device: str = "auto",
    observe: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> dict[str, dict[str, Headline]]:
    """Analyse runs.

    Args:
        what: Names in `STUDIES`.
        root: Folder of the data sets.
        samples: Number of training samples, and of test samples, to use; the same ones for all runs with equal data.
        seed, workers, memory, progress: See `Protocol`.
        write: Write tables (JSON, CSV) and figures (PNG, SVG) to the folder `analysis` of the run; an analysis of
            several runs goes to the folder of the first.
        out: Write them to a folder in this one instead, with the run's name; the run folder is only read.
        model, federation: The module and the data, if the runs used your own.
        client: Analyse this client's own model, where the method keeps one, on its own data; written to the folder
            `analysis/client-N`.
        severity: Of the corruptions, 1 to 5.
        device: Where to compute: auto, cpu, cuda, cuda:1 …
        observe: Called with the name of every analysis and its whole results, by run.

    Returns:
        {analysis: {run: headline numbers}}.
    """
    _check(runs, what, samples)
    own, where = {"severity": severity, "root": root}, resolve_one(device)
    shared: dict[str, Any] = {"root": root, "samples": samples, "seed": seed, "pools": {}}  # of runs on the same data
    loaded = [run_data(run, model=model, federation=federation, **shared) for run in runs]
    if client is not None:
        loaded = [client_data(each, client, samples) for each in loaded]
    pairs = list(zip(_labels(runs), [each.on(where) for each in loaded], strict=True))
    made = {"samples": samples, "seed": seed, "device": str(home_of(where))}
    keep = partial(_keep, made=made, out=out, client=client) if write else None
    usual: dict[str, Any] = {"seed": seed, "workers": workers, "memory": memory, "progress": progress}
    found: dict[str, dict[str, Headline]] = {}
    for name in what:
        options = usual | {key: value for key, value in own.items() if key in STUDIES[name].takes}
        results = _results(name, pairs, options, keep)
        found[name] = {label: STUDIES[name].headline(result) for label, result in results.items()}
        if write:
            _together(name, results, analysis_folder(loaded[0].run.out, "together", out))
        if observe:
            observe(name, results)
    return found


def _results(
    name: str, pairs: list[tuple[str, RunData]], options: dict[str, Any], keep: Callable[..., None] | None
) -> dict[str, Any]:
    """The results of one analysis by run, or by the names of all runs together; each is kept when it is there."""
    results: dict[str, Any] = {}
    for group in [pairs] if STUDIES[name].runs > 1 else [[pair] for pair in pairs]:
        label, looked = " / ".join(label for label, _ in group), [one for _, one in group]
        results[label] = STUDIES[name].look(*looked, loss=looked[0].run._state.setup.criterion, **options)
        if keep:
            keep(name, group, results[label])
    return results


def _keep(
    name: str,
    group: Sequence[tuple[str, RunData]],
    result: Any,
    made: Mapping[str, Any],
    out: str | Path | None,
    client: int | None,
) -> None:
    """Write a result to its folder, if there is one."""
    label, first = group[0]
    target = analysis_folder(first.run.out, label, out)
    if target is not None:
        target = target / f"client-{client}" if client is not None else target
        told = {"runs": [label for label, _ in group], "rounds": len(first.run.metrics), **made}
        store(target, name, result, STUDIES[name].headline(result), told)


def _together(name: str, results: Mapping[str, Any], folder: Path | None) -> None:
    """Draw several runs in one figure, in the folder of the first."""
    draw = STUDIES[name].together
    if draw is None or folder is None or len(results) < 2:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _save(lambda: draw(results), folder, f"{name}-together")


def analysis_folder(run: Path | None, label: str, out: str | Path | None) -> Path | None:
    """Where the analyses of a run are written; None if there is no such place."""
    if out is not None:
        return Path(out) / slug(label)
    return run / "analysis" if run else None


def _check(runs: Sequence[Run | str | Path], what: Sequence[str], samples: int) -> None:
    if not what:
        raise InputError(f"name at least one analysis: {', '.join(STUDIES)}")
    for name in what:
        if name not in STUDIES:
            raise UnknownNameError("analysis", name, STUDIES)
        needed = STUDIES[name].runs
        if needed > 1 and len(runs) != needed:
            raise InputError(f"{name} analyses {needed} runs together, got {len(runs)}: name {needed} run folders")
    if samples < 1:
        raise InputError(f"samples must be 1 or more, got {samples}")


def _labels(runs: Sequence[Run | str | Path]) -> list[str]:
    """The folder name of each run; its whole path if another run has the same name."""
    paths = [run.out if isinstance(run, Run) else Path(run) for run in runs]
    names = [path.name if path else "in memory" for path in paths]
    return [str(path) if path and names.count(path.name) > 1 else name for path, name in zip(paths, names, strict=True)]


def store(folder: Path, name: str, result: Any, headline: Headline, made: Mapping[str, Any]) -> None:
    """Write a result and how it was made as JSON, its headline to `summary.csv`, its plot as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**made, "headline": headline, **result.to_dict()}
    write_atomically(folder / f"{name}.json", (json.dumps(content, indent=1) + "\n").encode())
    _update(folder / "summary.csv", name, headline)
    if hasattr(result, "plot"):
        _save(result.plot, folder, name)


def _save(draw: Callable[[], Any], folder: Path, name: str) -> None:
    try:
        figure = draw()
    except InputError as error:  # a package is missing; the numbers are written
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
