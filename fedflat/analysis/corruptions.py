"""Robustness to corrupted images (FedASAM paper, figs. 6 and 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.batches import subset
from fedflat.analysis.corrupted import CORRUPTIONS, SEVERITIES, Corruption, check_images, corrupt
from fedflat.analysis.drawing import BLUE, QUIET, RED, SERIES, dress
from fedflat.analysis.problem import Options, Problem, Protocol, opened, suited
from fedflat.analysis.progress import tracked
from fedflat.analysis.published import Published
from fedflat.analysis.results import plain
from fedflat.core.devices import hosted, on
from fedflat.core.flat import FlatModel
from fedflat.core.scores import are_class_scores
from fedflat.data.preprocess import Preprocess
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import blank_figure


@dataclass(frozen=True, eq=False)
class Corruptions:
    """Accuracy on corrupted images.

    Attributes:
        clean: Accuracy on the images as they are.
        accuracy: Accuracy per corruption, one number per severity.
        severities: The severities looked at.
        samples: Number of images.
        faith: Where the images of each corruption come from: "published" files, or made here and then "exact",
            "in law" or "approximate" (see `corrupted`).
        group: What each corruption is: noise, blur, weather or digital.
    """

    clean: float
    accuracy: dict[str, list[float]]
    severities: tuple[int, ...]
    samples: int
    faith: dict[str, str]
    group: dict[str, str]

    @property
    def mean(self) -> float:
        """Mean accuracy over corruptions and severities."""
        return float(torch.tensor(list(self.accuracy.values()), dtype=torch.float64).mean())

    @property
    def drop(self) -> float:
        """Accuracy on clean images − mean accuracy on corrupted ones."""
        return self.clean - self.mean

    @property
    def by_corruption(self) -> dict[str, float]:
        """Mean accuracy over the severities, per corruption."""
        return {name: sum(values) / len(values) for name, values in self.accuracy.items()}

    @property
    def by_group(self) -> dict[str, float]:
        """Mean accuracy per kind of corruption: noise, blur, weather, digital."""
        groups: dict[str, list[float]] = {}
        for name, value in self.by_corruption.items():
            groups.setdefault(self.group[name], []).append(value)
        return {group: sum(values) / len(values) for group, values in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self, "mean", "drop", "by_corruption", "by_group")

    def plot(self) -> Any:
        """A bar per corruption, with the accuracy on clean images; a star marks an approximate corruption."""
        figure = blank_figure(6.5, 1.2 + 0.25 * len(self.accuracy))
        axes = figure.subplots()
        values = self.by_corruption
        names = [name.replace("_", " ") + (" *" if self.faith[name] == "approximate" else "") for name in values]
        axes.barh(names, list(values.values()), color=BLUE, height=0.7)
        axes.axvline(self.clean, color=QUIET, linestyle=":", label=f"clean {self.clean:.3f}")
        axes.axvline(self.mean, color=RED, linestyle=":", label=f"mean {self.mean:.3f}")
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
        dress(axes, f"accuracy at severity {', '.join(map(str, self.severities))}", "", "")
        return figure


def corruptions_figure(found: Mapping[str, Sequence[Corruptions]]) -> Any:
    """Methods beside each other, as in figs. 6 and 8 of the FedASAM paper: a row per corruption, the easiest first.

    Args:
        found: Results by name, one per seed: a dot is their mean, its line reaches from the lowest to the highest.
    """
    if not found or not all(found.values()):
        raise InputError("there is nothing to draw: give results of corruptions by name")
    rows = {
        name: {c: [one.by_corruption[c] for one in seeds] for c in seeds[0].accuracy} for name, seeds in found.items()
    }
    first, faith = next(iter(rows.values())), next(iter(found.values()))[0].faith
    order = ["clean", *sorted(first, key=lambda c: -sum(first[c]) / len(first[c]))]
    figure = blank_figure(7.5, 1.4 + 0.3 * len(order))
    axes = figure.subplots()
    for place, (name, seeds) in enumerate(found.items()):
        values = rows[name] | {"clean": [one.clean for one in seeds]}
        shift, colour = 0.6 * ((place + 0.5) / len(found) - 0.5), SERIES[place % len(SERIES)]
        means = [sum(values[c]) / len(values[c]) for c in order]
        heights = [at + shift for at in range(len(order))]
        axes.hlines(heights, [min(values[c]) for c in order], [max(values[c]) for c in order], color=colour, alpha=0.5)
        axes.plot(means, heights, "o", color=colour, markersize=4, label=name)
    names = [c.replace("_", " ") + (" *" if faith.get(c) == "approximate" else "") for c in order]
    axes.set_yticks(range(len(order)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e8ebef")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.06), ncols=3)
    severities = next(iter(found.values()))[0].severities
    dress(axes, f"accuracy at severity {', '.join(map(str, severities))}", "", "")
    return figure


def corruptions(
    model: nn.Module | FlatModel,
    data: tuple[Tensor, Tensor],
    *,
    severity: int | Sequence[int] = 5,
    names: Sequence[str] | None = None,
    table: Mapping[str, Corruption] = CORRUPTIONS,
    preprocess: Preprocess | None = None,
    published: str | Path | None = None,
    **options: Unpack[Options],
) -> Corruptions:
    """Accuracy of a classifier on corrupted images.

    Args:
        data: Images (N, C, H, W), before normalisation, and labels. Images are uint8, or floating point from 0 to 1.
        severity: 1 to 5, or several of them.
        names: Names in `table`; all by default.
        table: Corruptions by name.
        preprocess: Makes model inputs from uint8 images; divides by 255 by default. If its `scale` is not 255, the
            images are taken to go from 0 to that value.
        published: Folder of published files (CIFAR-10-C, CIFAR-100-C). Corruptions that it holds are read from it; the
            data must then be the whole test set, in its order.

    Raises:
        InputError: A corruption or severity does not exist, or the data are no such images.
    """
    severities = (severity,) if isinstance(severity, int) else tuple(severity)
    protocol = Protocol.of(options)
    names = tuple(table) if names is None else names
    _check(severities, names, table)
    recipe = preprocess or Preprocess()
    if not (isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor)):
        raise InputError("corruptions need a pair (images, labels) of tensors")
    images, labels = _levels(hosted(data[0]), recipe.scale), hosted(torch.as_tensor(data[1]))
    recipe = replace(recipe, scale=255.0)
    files = Published(published, labels) if published is not None else ()
    rows = torch.arange(len(labels))
    if protocol.max_samples is not None:
        ((rows, labels),) = subset([(rows, labels)], protocol.max_samples, protocol.seed)
        images, protocol = images[rows], replace(protocol, max_samples=None)

    def made(name: str, severity: int) -> Tensor:
        if isinstance(files, Published) and name in files:
            return files.images(name, severity, rows, images)
        return corrupt(images, name, severity, seed=protocol.seed, table=table)

    found: dict[str, list[float]] = {name: [] for name in names}
    with (
        opened(model, (recipe(images, None), labels), protocol) as problem,
        tracked(protocol.progress, "corruptions", len(names) * len(severities)) as step,
    ):
        clean = _accuracy(problem, images, recipe)
        for name in names:
            for each in severities:
                found[name].append(_accuracy(problem, made(name, each), recipe))
                step()
    faith = {name: "published" if name in files else table[name].faith for name in names}
    return Corruptions(clean, found, severities, len(labels), faith, {name: table[name].group for name in names})


def _check(severities: Sequence[int], names: Sequence[str], table: Mapping[str, Corruption]) -> None:
    for name in names:
        if name not in table:
            raise UnknownNameError("corruption", name, table)
    if not names or not severities:
        raise InputError("name at least one corruption and one severity")
    for severity in severities:
        if severity not in SEVERITIES:
            raise InputError(f"severity must be a whole number from 1 to 5, got {severity}")


def _levels(images: Tensor, scale: float) -> Tensor:
    """Images as uint8 from 0 to 255."""
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise InputError(
                "images in floating point must be from 0 to 1: give them before normalisation, and preprocess=…"
            )
        images = (images.double() * 255).round().to(torch.uint8)
    elif images.dtype == torch.uint8 and scale != 255:
        images = (images.double() * (255 / scale)).round().clamp(0, 255).to(torch.uint8)
    check_images(images)
    return images


def _accuracy(problem: Problem, images: Tensor, recipe: Preprocess) -> float:
    """Accuracy on images that stand for those of the problem, in its batches."""
    right, start = [], 0
    with torch.no_grad():
        for _, y in problem.batches:
            x = recipe(on(images[start : start + len(y)], problem.device), None)
            output = problem.flat.module(suited(x, problem.flat.theta))
            if not are_class_scores(output, y) or y.dim() != 1:
                raise InputError("corruptions need a classifier: scores of shape (batch, classes), one label per image")
            right.append((output.argmax(1) == y).sum())
            start += len(y)
    return int(torch.stack(right).sum()) / start
