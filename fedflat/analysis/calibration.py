"""Calibration: does a classifier's confidence match its accuracy?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.drawing import BLUE, QUIET, dress
from fedflat.analysis.features import class_scores
from fedflat.analysis.problem import Options
from fedflat.analysis.results import plain
from fedflat.core.devices import hosted
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError
from fedflat.extras import blank_figure


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence against accuracy, over equal bins b of the confidence.

    Attributes:
        error: Expected calibration error, Σ (n_b/n)·|accuracy − confidence|.
        worst: The largest |accuracy − confidence| of a bin.
        confidence, accuracy: Mean per bin; nan where the bin is empty.
        counts: Number of samples per bin.
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
        """The reliability diagram."""
        figure = blank_figure(4.5, 4.2)
        axes = figure.subplots()
        bins = len(self.counts)
        edges = [i / bins for i in range(bins)]
        axes.bar(
            edges, self.accuracy.nan_to_num(0).tolist(), width=0.95 / bins, align="edge", color=BLUE, label="accuracy"
        )
        axes.plot([0, 1], [0, 1], color=QUIET, linestyle=":", label="perfect")
        dress(axes, f"expected calibration error {self.error:.3f}", "confidence", "")
        axes.legend(frameon=False)
        return figure


def calibration(model: nn.Module | FlatModel, data: Any, *, bins: int = 15, **options: Unpack[Options]) -> Calibration:
    """Calibration of a classifier on data. bins: number of equal parts of (0, 1]."""
    return calibration_of(*class_scores(model, data, "calibration", **options), bins)


def calibration_of(logits: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """Calibration of given scores (before the softmax), one row per label."""
    logits, labels = hosted(logits), hosted(labels)
    if bins < 1:
        raise InputError(f"at least one bin is needed, got {bins}")
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels) or bool(logits.isnan().any()):
        raise InputError("one row of scores per label is needed, at least one, and none of them nan")
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
