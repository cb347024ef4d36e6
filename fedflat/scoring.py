"""How well a model does on samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedflat.data.federation import IGNORED, Samples
from fedflat.task import Task


@dataclass
class Score:
    """Sums over evaluated samples; `+` joins two of them."""

    count: int = 0
    loss: float = 0.0
    correct: int = 0
    judged: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.count + other.count,
            self.loss + other.loss,
            self.correct + other.correct,
            self.judged + other.judged,
        )

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; None where the task has no labels to be right about."""
        return self.correct / self.judged if self.judged else None

    @property
    def mean_loss(self) -> float | None:
        """Mean loss a sample."""
        return self.loss / self.count if self.count else None


CHUNK, EVALUATION_BATCH = 1000, 250


@torch.no_grad()
def assess(task: Task, samples: Samples, start: int, stop: int) -> Score:
    """Score the model's current weights on samples start…stop, in evaluation mode."""
    task.model.module.eval()
    score = Score()
    for low, high in pieces(start, stop, EVALUATION_BATCH):
        x, y = samples.batch(torch.arange(low, high))
        output = task.model(task.federation.preprocess(x, None, task.model.theta.dtype))
        loss = task.criterion(output, y).item()
        correct, judged = judge(output, y)
        count = judged or len(y)
        score += Score(count, loss * count, correct, judged)
    return score


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Borders of pieces of `size`; a single sample left over joins the one before it, as it has no statistics.

    >>> pieces(0, 5, 2)
    [(0, 2), (2, 5)]
    """
    lows = list(range(start, stop, size))
    if len(lows) > 1 and stop - lows[-1] == 1:
        lows.pop()
    return list(zip(lows, [*lows[1:], stop], strict=True))


def judge(output: Any, y: Tensor) -> tuple[int, int]:
    """How many labels are right, and how many there are to be right about: none where the output is no class scores."""
    classes = isinstance(output, Tensor) and output.dim() >= 2 and not y.is_floating_point()
    if not classes or output.shape[1] < 2 or output.shape[:1] + output.shape[2:] != y.shape:
        return 0, 0
    valid = y != IGNORED
    return int(((output.argmax(dim=1) == y) & valid).sum()), int(valid.sum())
