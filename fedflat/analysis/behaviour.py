"""How well a model predicts: per class, over the rounds, and on data it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.features import class_scores
from fedflat.analysis.landscape import scores
from fedflat.analysis.problem import Options, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.core.curves import round_reaching, tail_mean
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError


def per_class_accuracy(
    model: nn.Module | FlatModel, data: Any, *, classes: int | None = None, **options: Unpack[Options]
) -> Tensor:
    """Accuracy per class; nan for a class without samples.

    Args:
        classes: Number of classes; None takes the number of the model's outputs.
    """
    logits, labels = class_scores(model, data, "accuracy by class", **options)
    count = logits.shape[1] if classes is None else classes
    if int(labels.min()) < 0 or int(labels.max()) >= count:
        raise InputError(f"labels from {int(labels.min())} to {int(labels.max())} do not fit {count} classes")
    right = (logits.argmax(1) == labels).double()
    totals = torch.zeros(count, dtype=torch.float64).index_add_(0, labels, torch.ones_like(right))
    return torch.zeros(count, dtype=torch.float64).index_add_(0, labels, right) / totals


def forgetting(accuracy: Tensor | Sequence[Sequence[float]]) -> Tensor:
    """max over s < t of A[s, k] − A[t, k] for every round t > 0: how far each client's accuracy is below its best.

    Args:
        accuracy: A, one row per round, one column per client (or class).

    Returns:
        A matrix of the same shape. Row 0 is zero; a negative value is a new best.
    """
    matrix = torch.as_tensor(accuracy, dtype=torch.float64)
    if matrix.dim() != 2 or len(matrix) == 0:
        raise InputError(f"one row per round and one column per client are needed, got shape {tuple(matrix.shape)}")
    best = matrix.cummax(0).values
    return torch.cat([torch.zeros_like(matrix[:1]), best[:-1] - matrix[1:]])


@dataclass(frozen=True)
class RoundsToTarget:
    """The first round (counted from 1) that reaches a target; None, printed as "T+", if none of the T rounds does."""

    round: int | None
    rounds: int

    def __str__(self) -> str:
        return str(self.round) if self.round is not None else f"{self.rounds}+"

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self)


def rounds_to_target(accuracy: Sequence[float], target: float, *, window: int = 1) -> RoundsToTarget:
    """The first round at which a curve of accuracies, one per round, reaches a target.

    A mean curve may reach the target later than every single seed, or never: report both.

    Args:
        window: Number of rounds of the moving average that is compared with the target.
    """
    if window < 1:
        raise InputError(f"window must be at least 1, got {window}")
    values = torch.as_tensor(accuracy, dtype=torch.float64)
    means = ((last, float(values[last - window : last].mean())) for last in range(window, len(values) + 1))
    return RoundsToTarget(round_reaching(means, target), len(values))


def tail_average(values: Sequence[float], last: int = 100) -> float:
    """Mean over the last `last` rounds, or over all if there are fewer."""
    if not len(values) or last < 1:
        raise InputError("at least one value and one round are needed")
    mean = tail_mean(enumerate(map(float, values), start=1), last, len(values))
    assert mean is not None
    return mean


@dataclass(frozen=True)
class Generalisation:
    """Loss and accuracy on training and on test data, and the gaps between them."""

    train_loss: float
    test_loss: float
    train_accuracy: float
    test_accuracy: float

    @property
    def loss_gap(self) -> float:
        """Test loss − training loss."""
        return self.test_loss - self.train_loss

    @property
    def accuracy_gap(self) -> float:
        """Training accuracy − test accuracy."""
        return self.train_accuracy - self.test_accuracy

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self, "loss_gap", "accuracy_gap")


def generalisation(model: nn.Module | FlatModel, data: Any, test: Any, **options: Unpack[Options]) -> Generalisation:
    """Loss and accuracy of a model on its training data and on test data."""
    found = []
    for each in (data, test):
        with opened(model, each, Protocol.of(options)) as problem:
            found.append(scores(problem))
    (loss, error), (test_loss, test_error) = found
    return Generalisation(loss, test_loss, 1 - error, 1 - test_error)
