"""Outputs and penultimate features of a model, and how well they separate the classes."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.problem import Options, Problem, Protocol, opened, suited
from fedflat.core.devices import hosted
from fedflat.core.flat import FlatModel
from fedflat.core.samples import IGNORED
from fedflat.core.scores import are_class_scores
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import needed

LAYERS = ("logits", "penultimate")


def features(
    model: nn.Module | FlatModel, data: Any, *, layer: str = "penultimate", **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Features of all samples, one row per sample, and their labels, on the CPU.

    Args:
        layer: "penultimate" is the input of the last linear layer; "logits" is the model's output.
    """
    with opened(model, data, Protocol.of(options)) as problem:
        return features_of(problem, layer)


def features_of(problem: Problem, layer: str) -> tuple[Tensor, Tensor]:
    """Features and labels of an open problem; see `features`."""
    if layer not in LAYERS:
        raise UnknownNameError("layer", layer, LAYERS)
    if layer == "penultimate":
        problem.flat.capture_features("layer='penultimate'")
    rows: list[Tensor] = []
    with torch.no_grad():
        for x, y in problem.batches:
            output = problem.flat.module(suited(x, problem.flat.theta))
            found = problem.flat.take_features() if layer == "penultimate" else output
            if not isinstance(found, Tensor):
                raise InputError(f"the model's {layer} are not a tensor")
            rows.append(found.reshape(len(y), -1))
    return hosted(torch.cat(rows)), hosted(torch.cat([y for _, y in problem.batches]))


def class_scores(
    model: nn.Module | FlatModel, data: Any, needed_for: str, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Class scores and labels, one row per sample, or per position of an image or a sequence.

    Labels of −100 are left out, as in cross-entropy.

    Args:
        needed_for: Name of the analysis in error messages.
    """
    found: list[tuple[Tensor, Tensor]] = []
    with opened(model, data, Protocol.of(options)) as problem, torch.no_grad():
        for x, y in problem.batches:
            output = problem.flat.module(suited(x, problem.flat.theta))
            if not are_class_scores(output, y):
                raise InputError(
                    f"{needed_for} needs scores of shape (batch, classes, …) and integer labels (batch, …)"
                )
            found.append((output.movedim(1, -1).flatten(0, -2), y.flatten()))
    scores, labels = (hosted(torch.cat(parts)) for parts in zip(*found, strict=True))
    kept = labels != IGNORED
    if not bool(kept.any()):
        raise InputError(f"{needed_for} needs a label, but all of them are {IGNORED}, which is to be ignored")
    return scores[kept], labels[kept]


def feature_norm(
    model: nn.Module | FlatModel, data: Any, *, layer: str = "logits", **options: Unpack[Options]
) -> float:
    """Mean norm of the features over the samples (FedASAM paper, fig. 7)."""
    rows, _ = features(model, data, layer=layer, **options)
    return float(rows.double().norm(dim=1).mean())


def silhouette(rows: Tensor, labels: Tensor) -> float:
    """Mean over samples of (b − a)/max(a, b): a is the mean distance to the own class, b to the nearest other one.

    It is near 1 if classes are compact and far apart, and below 0 if they are mixed. A class of one sample counts as 0.
    """
    rows, labels = hosted(rows), hosted(labels)
    classes, own, counts = _classes(rows, labels)
    totals = torch.stack([_distances(rows, rows[own == c]).sum(1) for c in range(len(classes))], 1)
    place = torch.arange(len(rows))
    inside = totals[place, own] / (counts[own] - 1).clamp_min(1)
    outside = totals / counts
    outside[place, own] = torch.inf
    nearest = outside.min(1).values
    value = (nearest - inside) / torch.maximum(inside, nearest).clamp_min(torch.finfo(torch.float64).tiny)
    return float(torch.where(counts[own] > 1, value, 0.0).mean())


def nearest_centroid_accuracy(rows: Tensor, labels: Tensor) -> float:
    """Fraction of samples that are nearer to the mean of their own class than to any other mean."""
    rows, labels = hosted(rows), hosted(labels)
    classes, own, _ = _classes(rows, labels)
    centres = torch.stack([rows[own == c].double().mean(0) for c in range(len(classes))])
    return float((_distances(rows, centres).argmin(1) == own).double().mean())


def _classes(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The classes, the class index of each sample, and the class sizes."""
    if labels.shape != rows.shape[:1]:
        raise InputError(f"one label per row is needed: {len(rows)} rows have labels of shape {tuple(labels.shape)}")
    classes, own, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise InputError("at least two classes are needed to say how far apart they are")
    return classes, own, counts


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def tsne(rows: Tensor, *, perplexity: float = 30.0, seed: int = 0) -> Tensor:
    """The rows in two dimensions by t-SNE, which needs scikit-learn."""
    manifold = needed("sklearn.manifold", "scikit-learn, which t-SNE needs,", "report")
    threads = needed("threadpoolctl", "threadpoolctl", "report")
    if len(rows) <= max(perplexity, 1):
        raise InputError(
            f"t-SNE needs more than {len(rows)} samples for perplexity {perplexity}: give more samples or lower it"
        )
    with threads.threadpool_limits(1):  # on a busy machine several threads wait for each other
        made = manifold.TSNE(perplexity=perplexity, random_state=seed, init="pca")
        return torch.as_tensor(made.fit_transform(hosted(rows).double().numpy()))
