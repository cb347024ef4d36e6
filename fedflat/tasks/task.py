"""What a target is: one small class per task. Nothing else in the package asks which task it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.samples import IGNORED
from fedflat.errors import InputError, UnknownNameError
from fedflat.tasks.losses import BinaryCrossEntropy, CrossEntropy, SquaredError


class Task:
    """A kind of output. A task of your own is a subclass, given as `Federation(task=MyTask())`.

    Attributes:
        name: Its name in records.
        metrics: Names in `METRICS` (or `Metric` objects) that are measured; the first one leads: it decides which
            round is the best, and comparisons and reports are about it. Without any, the loss leads.
    """

    name: str = "task"
    metrics: tuple[Any, ...] = ()

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The default loss, a mean over the batch."""
        raise NotImplementedError

    def outputs(self, y: Tensor) -> int:
        """How many outputs a network needs for targets like these."""
        return int(y.shape[1]) if y.dim() > 1 else 1

    def labels(self, y: Tensor) -> Tensor | None:
        """Class labels to count in pictures of who holds what; None if targets are no classes."""
        return None

    def check(self, output: Any, y: Tensor) -> None:
        """Refuse an output that does not fit the targets, with an `InputError`."""

    def shown(self, count: int) -> list[int]:
        """Which of the `count` samples of a test set the report shows as pictures; by default none."""
        return []

    def drawn(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Prediction and truth as images of class numbers (batch, height, width); negative where there is no truth."""
        return None

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class Classification(Task):
    """One class per sample, or per position of it: labels (batch, …) of whole numbers, scores (batch, classes, …)."""

    name = "classification"
    metrics: tuple[Any, ...] = ("accuracy",)
    loss = staticmethod(F.cross_entropy)  # type: ignore[assignment]
    remedy = "; scores are (classes, …) for labels (…)"

    def outputs(self, y: Tensor) -> int:
        """The largest label + 1."""
        if y.is_floating_point():
            raise InputError(
                "targets are not integers, so the number of classes is unknown; give Federation(classes=…)"
            )
        return 1 + int(y.max()) if y.numel() else 0

    def labels(self, y: Tensor) -> Tensor | None:
        """The targets that are not ignored."""
        flat = y.reshape(-1)
        return None if y.is_floating_point() else flat[flat != IGNORED]

    def check(self, output: Any, y: Tensor) -> None:
        """Scores need one column per class."""
        if not isinstance(output, Tensor) or output.dim() < 2:
            raise InputError("the model must return one row of class scores per sample; for other outputs give loss=…")
        if y.is_floating_point() and output.shape[1] < 2:
            raise InputError("the targets are numbers, not classes, which cross-entropy cannot learn: give loss=…")
        if not y.is_floating_point() and output.shape[:1] + output.shape[2:] != y.shape:
            found, wanted = (str(tuple(shape[1:])) for shape in (output.shape, y.shape))
            raise InputError(f"the model gives scores {found} for the labels {wanted} of a sample{self.remedy}")


class Segmentation(Classification):
    """One class per pixel: labels (batch, height, width), −100 where there is none; scores (batch, classes, …).

    Networks may return several heads in training, the main one first; the losses of all are added.
    """

    name = "segmentation"
    metrics = ("miou", "accuracy", "iou")
    loss = CrossEntropy()  # type: ignore[assignment]
    remedy = "; segmentation needs a network with scores for every pixel, such as bisenetv2"

    def shown(self, count: int) -> list[int]:
        """Three samples, evenly spaced."""
        return sorted({count * place // 6 for place in (1, 3, 5)}) if count else []

    def drawn(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """The class with the highest score, and the labels."""
        return output.argmax(dim=1), y


class NextToken(Classification):
    """The next symbol of a text: labels (batch,) after the last position, or (batch, length) after every one."""

    name = "next_token"
    metrics = ("accuracy", "perplexity")
    remedy = "; for labels at every position, data and network both need every=True"


class Regression(Task):
    """Numbers: targets (batch,) or (batch, outputs) in floating point."""

    name = "regression"
    metrics = ("rmse", "mae", "r2")
    loss = SquaredError()


class MultiLabel(Task):
    """Several labels at once, each 0 or 1: targets (batch, labels) in floating point. With one label: yes or no.

    A label is predicted where its score is above 0, that is its probability above one half.
    """

    name = "multi_label"
    metrics = ("accuracy", "macro_f1", "auc")
    loss = BinaryCrossEntropy()

    def labels(self, y: Tensor) -> Tensor | None:
        """The numbers of the labels that are 1; for a single label its value."""
        flat = y.reshape(len(y), -1)
        return flat[:, 0].long() if flat.shape[1] == 1 else torch.nonzero(flat > 0.5)[:, 1]


_ALL = (Classification(), Segmentation(), NextToken(), Regression(), MultiLabel())
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""The tasks by name."""


def task_of(given: str | Task) -> Task:
    """A task by name, or the one given."""
    if isinstance(given, Task):
        return given
    if given not in TASKS:
        raise UnknownNameError("task", str(given), TASKS)
    return TASKS[given]


def task_for(y: Tensor) -> Task:
    """The task of unknown targets: regression if they are in floating point, otherwise classification."""
    return TASKS["regression" if y.is_floating_point() else "classification"]
