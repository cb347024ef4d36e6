"""Whether a classifier is as often right as it is sure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.features import class_scores
from fedflat.analysis.protocol import Options
from fedflat.analysis.results import plain
from fedflat.errors import InputError
from fedflat.flat import FlatModel


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence against accuracy.

    error: expected calibration error, Σ (n_b/n)·|accuracy − confidence| over equal bins of confidence; worst: the
    largest term without its weight. confidence, accuracy: means of each bin, nan where it is empty; counts: samples.
    """

    error: float
    worst: float
    confidence: Tensor
    accuracy: Tensor
    counts: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """A matplotlib figure: the reliability diagram."""
        from fedflat.analysis.plots import calibration_figure

        return calibration_figure(self)


def calibration(model: nn.Module | FlatModel, data: Any, *, bins: int = 15, **options: Unpack[Options]) -> Calibration:
    """Whether a classifier is as often right as it is sure. bins: equal parts of (0, 1]."""
    return calibration_of(*class_scores(model, data, "calibration", **options), bins)


def calibration_of(logits: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """The same of given scores (before the softmax), one row a label."""
    if bins < 1:
        raise InputError(f"at least one bin is needed, got {bins}")
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels) or bool(logits.isnan().any()):
        raise InputError("one row of scores a label is needed, at least one, and none of them nan")
    sure, chosen = logits.double().softmax(1).max(1)
    right = (chosen == labels).double()
    place = (sure * bins).ceil().long().clamp(1, bins) - 1
    counts, sums, hits = (
        torch.zeros(bins, dtype=torch.float64).index_add_(0, place, values)
        for values in (torch.ones_like(sure), sure, right)
    )
    confidence, accuracy = sums / counts, hits / counts
    gaps = (accuracy - confidence).abs().nan_to_num(0.0)
    error = float((counts / len(labels) * gaps).sum())
    return Calibration(error, float(gaps.max()), confidence, accuracy, counts.long())
