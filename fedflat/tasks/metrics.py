"""Metrics: figures computed from sums that workers can add, never from all predictions in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.curves import falls, is_share
from fedflat.errors import InputError, UnknownNameError
from fedflat.tasks import statistics as sums_of
from fedflat.words import shortened

Count = Callable[[Any, Tensor], Tensor]
Value = Callable[[np.ndarray], "float | list[float | None] | None"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: Its name in records.
        count: From a model's output and the targets of a batch, sums over the samples, as a tensor.
        value: From the sums over all samples (a float64 array of the shape that `count` gives), the figure; a list is
            one figure per class, None a figure that does not exist.
        falls: Whether less is better.
        share: Whether it is a share of 1, which tables show in percent.
    """

    name: str
    count: Count
    value: Value
    falls: bool = False
    share: bool = False

    @property
    def key(self) -> str:
        """Metrics with the same key use the same sums, which are computed once."""
        function = self.count
        return function.__name__ if getattr(function, "__module__", "") == sums_of.__name__ else f"{self.name}.sums"


def _ratio(sums: np.ndarray) -> float | None:
    return float(sums[0] / sums[1]) if sums[1] else None


def _recall(sums: np.ndarray) -> float | None:
    """Mean recall over the classes that occur."""
    right, _, missed = sums.T
    known = right + missed > 0
    return float((right[known] / (right + missed)[known]).mean()) if known.any() else None


def _macro_f1(sums: np.ndarray) -> float | None:
    """Mean F1 over the classes that occur or are predicted."""
    right, false, missed = sums.T
    seen = right + false + missed > 0
    return float((2 * right / np.maximum(2 * right + false + missed, 1))[seen].mean()) if seen.any() else None


def _iou(sums: np.ndarray) -> list[float | None]:
    """Intersection over union per class; None for a class that the truth does not have."""
    right, false, missed = sums.T
    return [float(r / (r + f + m)) if r + m else None for r, f, m in zip(right, false, missed, strict=True)]


def _miou(sums: np.ndarray) -> float | None:
    found = [value for value in _iou(sums) if value is not None]
    return float(np.mean(found)) if found else None


def _auc(sums: np.ndarray) -> float | None:
    """Mean over the classes of the area under the ROC curve; scores that fall into one bin count as equal."""
    areas = []
    for others, own in sums:
        if others.sum() and own.sum():
            below = np.concatenate([[0.0], np.cumsum(others)[:-1]])
            areas.append(float((own * (below + others / 2)).sum() / (others.sum() * own.sum())))
    return float(np.mean(areas)) if areas else None


def _calibration(sums: np.ndarray) -> float | None:
    count, confidence, right = sums.T
    return float(np.abs(confidence - right).sum() / count.sum()) if count.sum() else None


def _perplexity(sums: np.ndarray) -> float | None:
    mean = _ratio(sums)
    return None if mean is None else float(np.exp(min(mean, 700.0)))


def _rmse(sums: np.ndarray) -> float | None:
    return float(np.sqrt(sums[1] / sums[0])) if sums[0] else None


def _mae(sums: np.ndarray) -> float | None:
    return float(sums[2] / sums[0]) if sums[0] else None


def _r2(sums: np.ndarray) -> float | None:
    if not sums[0]:
        return None
    spread = sums[4] - sums[3] ** 2 / sums[0]
    return float(1 - sums[1] / spread) if spread > 1e-12 * max(sums[4], 1e-300) else None


def _known(name: str, count: Count, value: Value) -> Metric:
    return Metric(name, count, value, falls(name), is_share(name))


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _known("accuracy", sums_of.hits, _ratio),
        _known("top5", sums_of.top5_hits, _ratio),
        _known("balanced_accuracy", sums_of.class_counts, _recall),
        _known("macro_f1", sums_of.class_counts, _macro_f1),
        _known("auc", sums_of.score_histograms, _auc),
        _known("miou", sums_of.class_counts, _miou),
        _known("iou", sums_of.class_counts, _iou),
        _known("ece", sums_of.confidences, _calibration),
        _known("perplexity", sums_of.log_losses, _perplexity),
        _known("rmse", sums_of.errors, _rmse),
        _known("mae", sums_of.errors, _mae),
        _known("r2", sums_of.errors, _r2),
    )
}
"""The package's metrics by name.

`auc` comes from histograms of 1,000 equal bins of the probability, so that workers can add it: scores in one bin count
as equal. Of several classes it is the mean over "this class against the rest". `ece` has 15 equal bins.
"""

Wanted = str | Metric | Iterable[str | Metric] | Mapping[str, Any]


def metrics_of(wanted: Wanted) -> list[Metric]:
    """The metrics that a user asks for.

    Args:
        wanted: Names of `METRICS`, `Metric` objects, or {name: function}. A function takes (output, y) and returns a
            mean over the batch; its figure is the mean over all samples. More of it is better unless its name says
            otherwise (…loss, …error, …mse, …mae); {name: (function, "min")} or "max" settles it.
    """
    if isinstance(wanted, (str, Metric)):
        wanted = [name.strip() for name in wanted.split(",") if name.strip()] if isinstance(wanted, str) else [wanted]
    pairs = wanted.items() if isinstance(wanted, Mapping) else [(None, one) for one in wanted]
    return [_metric(name, one) for name, one in pairs]


def _metric(name: str | None, given: Any) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        if given not in METRICS:
            raise UnknownNameError("metric", given, METRICS)
        return METRICS[given]
    given, *better = given if isinstance(given, tuple) else (given,)
    if name is None or not callable(given) or len(better) > 1:
        raise InputError(f"metrics takes names, Metric objects or {{name: function}}, not {shortened(given)}")
    if better and better[0] not in ("min", "max"):
        raise InputError(f'metric {name!r} takes (function, "min") or (function, "max"), not {shortened(better[0])}')
    less = better == ["min"] if better else falls(name)
    if hasattr(given, "metric_state") and hasattr(given, "compute"):
        from fedflat.tasks.foreign import from_torchmetrics

        count, value, told = from_torchmetrics(name, given)
        return Metric(name, count, value, less if better else told, is_share(name))
    return Metric(name, _Mean(name, given), _ratio, less, is_share(name))


class _Mean:
    """A user's function of (output, y), which is a mean over the batch, as sums."""

    def __init__(self, name: str, function: Callable[[Any, Tensor], Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        value = torch.as_tensor(self.function(output, y), dtype=torch.float64)
        if value.numel() != 1:
            raise InputError(f"metric {self.name!r} must return one number, a mean over the batch, not {value.shape}")
        return torch.stack([value.reshape(()).cpu() * len(y), torch.tensor(float(len(y)), dtype=torch.float64)])
