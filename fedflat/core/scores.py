"""Scores of a model as sums over samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.samples import IGNORED


@dataclass
class Score:
    """Sums over evaluated samples; `+` adds two scores.

    Attributes:
        count: The number of targets that the loss is a mean over.
        loss: The sum of their losses.
        sums: What the metrics are computed from, by `Metric.key`.
    """

    count: int = 0
    loss: float = 0.0
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    def __add__(self, other: Score) -> Score:
        sums = dict(self.sums)
        for key, value in other.sums.items():
            sums[key] = sums[key] + value if key in sums else value
        return Score(self.count + other.count, self.loss + other.loss, sums)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per sample."""
        return self.loss / self.count if self.count else None


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Borders of pieces of `size`; a single last sample, which has no statistics, joins the piece before it.

    >>> pieces(0, 5, 2)
    [(0, 2), (2, 5)]
    """
    lows = list(range(start, stop, size))
    if len(lows) > 1 and stop - lows[-1] == 1:
        lows.pop()
    return list(zip(lows, [*lows[1:], stop], strict=True))


def are_class_scores(output: Any, y: Tensor) -> bool:
    """Whether an output is a tensor of scores of classes, of which `y` are the labels."""
    classes = isinstance(output, Tensor) and output.dim() >= 2 and not y.is_floating_point()
    return classes and output.shape[1] >= 2 and output.shape[:1] + output.shape[2:] == y.shape


def judge(output: Any, y: Tensor) -> Tensor:
    """The numbers of correct and of all labels, where they are; both are 0 if these are not scores of classes."""
    if not are_class_scores(output, y):
        return torch.zeros(2, dtype=torch.int64, device=y.device)
    valid = y != IGNORED
    return torch.stack([((output.argmax(dim=1) == y) & valid).sum(), valid.sum()])
