"""Sums over a batch from which metrics are computed. Workers compute them per batch, and the server adds them.

Each function takes a model's output and the targets, and returns a float64 tensor. Targets are class labels of shape
(batch, …) with scores (batch, classes, …), or arrays of 0 and 1 (multi-label) or numbers (regression) of the output's
shape. Class labels of −100 are left out. An output that does not fit raises `InputError`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.samples import IGNORED
from fedflat.errors import InputError

BINS = 1000  # of the histograms of scores, for the area under the ROC curve
CONFIDENCE_BINS = 15  # of the calibration error


def by_class(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (n, classes) and labels (n,) of all positions that have a label."""
    shaped = isinstance(output, Tensor) and output.dim() >= 2 and not y.is_floating_point()
    if not shaped or output.shape[1] < 2 or output.shape[:1] + output.shape[2:] != y.shape:
        raise InputError(f"expected scores (batch, classes, …) for labels (batch, …), got {_shapes(output, y)}")
    scores, labels = output.movedim(1, -1).reshape(-1, output.shape[1]), y.reshape(-1)
    valid = labels != IGNORED
    return (scores, labels) if bool(valid.all()) else (scores[valid], labels[valid])


def alike(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output and targets as two tensors of the same shape; (batch, 1) and (batch,) count as the same."""
    if not isinstance(output, Tensor) or output.numel() != y.numel() or output.shape[:1] != y.shape[:1]:
        raise InputError(f"expected an output of the targets' shape, got {_shapes(output, y)}")
    return output, y.reshape(output.shape).to(output.dtype)


def _shapes(output: Any, y: Tensor) -> str:
    found = f"output {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    return f"{found} and targets {tuple(y.shape)} of {str(y.dtype).removeprefix('torch.')}"


def _labelled(output: Any, y: Tensor) -> bool:
    """Whether the targets are one class label per position, rather than one 0 or 1 per output."""
    return not y.is_floating_point()


def hits(output: Any, y: Tensor) -> Tensor:
    """(right labels, all labels)."""
    if _labelled(output, y):
        scores, labels = by_class(output, y)
        return _pair((scores.argmax(dim=1) == labels).sum(), labels.numel())
    scores, truth = alike(output, y)
    return _pair(((scores > 0) == (truth > 0.5)).sum(), truth.numel())


def top5_hits(output: Any, y: Tensor) -> Tensor:
    """(labels among the five highest scores, all labels)."""
    scores, labels = by_class(output, y)
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices
    return _pair((best == labels[:, None]).any(dim=1).sum(), labels.numel())


def class_counts(output: Any, y: Tensor) -> Tensor:
    """(classes, 3): per class the right positives, the false positives and the missed ones."""
    if _labelled(output, y):
        scores, labels = by_class(output, y)
        found, classes = scores.argmax(dim=1), scores.shape[1]
        right, said, true = (torch.bincount(v, minlength=classes) for v in (labels[found == labels], found, labels))
    else:
        scores, truth = alike(output, y)
        said_so, is_so = (t.reshape(len(t), -1) for t in (scores > 0, truth > 0.5))
        right, said, true = ((said_so & is_so).sum(0), said_so.sum(0), is_so.sum(0))
    return torch.stack([right, said - right, true - right], dim=1).double()


def score_histograms(output: Any, y: Tensor) -> Tensor:
    """(classes, 2, bins): histograms of each class's probability among the other samples and among its own."""
    if _labelled(output, y):
        scores, labels = by_class(output, y)
        chance, truth = scores.double().softmax(dim=1), F.one_hot(labels, scores.shape[1])
        if chance.shape[1] == 2:  # the second class says it all
            chance, truth = chance[:, 1:], truth[:, 1:]
    else:
        scores, targets = alike(output, y)
        chance, truth = (t.reshape(len(t), -1) for t in (scores.double().sigmoid(), (targets > 0.5).long()))
    classes = chance.shape[1]
    place = (chance * BINS).long().clamp_(max=BINS - 1) + BINS * (truth + 2 * torch.arange(classes, device=y.device))
    return torch.bincount(place.reshape(-1), minlength=2 * BINS * classes).reshape(classes, 2, BINS).double()


def confidences(output: Any, y: Tensor) -> Tensor:
    """(bins, 3): samples, sum of the confidence, and right labels, by the probability of the predicted class."""
    scores, labels = by_class(output, y)
    confidence, found = scores.double().softmax(dim=1).max(dim=1)
    place = (confidence * CONFIDENCE_BINS).long().clamp_(max=CONFIDENCE_BINS - 1)
    columns = torch.stack([torch.ones_like(confidence), confidence, (found == labels).double()], dim=1)
    return torch.zeros(CONFIDENCE_BINS, 3, dtype=torch.float64, device=y.device).index_add_(0, place, columns)


def log_losses(output: Any, y: Tensor) -> Tensor:
    """(sum of −log of the labels' probabilities, all labels)."""
    scores, labels = by_class(output, y)
    return _pair(F.cross_entropy(scores.double(), labels, reduction="sum"), labels.numel())


def errors(output: Any, y: Tensor) -> Tensor:
    """(n, sum of squared errors, of absolute errors, of targets, of squared targets)."""
    found, truth = (t.double() for t in alike(output, y))
    off = found - truth
    sums = [off.square().sum(), off.abs().sum(), truth.sum(), truth.square().sum()]
    return torch.stack([torch.tensor(float(truth.numel()), dtype=torch.float64, device=off.device), *sums])


def _pair(part: Tensor, whole: int) -> Tensor:
    return torch.stack([part.double(), torch.tensor(float(whole), dtype=torch.float64, device=part.device)])
