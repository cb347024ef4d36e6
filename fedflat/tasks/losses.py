"""Losses by name: `Experiment(loss="ohem(share=0.25)")`. All are means over the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.samples import IGNORED
from fedflat.errors import InputError
from fedflat.specs import build, parse
from fedflat.tasks.statistics import alike

Criterion = Callable[[Any, Tensor], Tensor]


def heads(output: Any) -> tuple[Any, ...]:
    """The outputs of all heads: networks with auxiliary heads return several in training, the main one first."""
    return output if isinstance(output, tuple) else (output,)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of class labels; labels of −100 are left out. Several heads count with weight 1 each.

    Args:
        label_smoothing: Share of the target that is spread evenly over the classes.
    """

    label_smoothing: float = 0.0

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        """The loss of a batch."""
        losses = [F.cross_entropy(head, y, label_smoothing=self.label_smoothing) for head in heads(output)]
        return torch.stack(losses).sum()


@dataclass(frozen=True)
class HardestPixels:
    """Cross-entropy of the hardest pixels of every image (OHEM), as FedDrive computes it.

    Args:
        share: The share of an image's pixels that count.
        valid_only: Take the share of the pixels that have a label. Otherwise ignored pixels count as pixels with loss
            0, as in FedDrive's code.
    """

    share: float = 0.25
    valid_only: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"ohem: share must lie in (0, 1], not {self.share}")

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return torch.stack([self._one(head, y) for head in heads(output)]).sum()

    def _one(self, output: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(output, y, reduction="none").flatten(1)
        if not self.valid_only:
            return losses.topk(max(1, int(self.share * losses.shape[1])), dim=1).values.mean()
        counts = (y.flatten(1) != IGNORED).sum(dim=1).mul(self.share).long().clamp(min=1).tolist()
        return torch.stack([row.topk(count).values.mean() for row, count in zip(losses, counts, strict=True)]).mean()


@dataclass(frozen=True)
class SquaredError:
    """Mean squared error; outputs (batch, 1) and targets (batch,) count as the same shape."""

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return F.mse_loss(*alike(output, y))


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Cross-entropy of 0 and 1 against scores (logits), a mean over samples and labels."""

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return F.binary_cross_entropy_with_logits(*alike(output, y))


def row_losses(criterion: Criterion) -> Criterion:
    """The loss of several batches: a function of outputs and targets with one more dimension in front."""
    if criterion is F.cross_entropy or criterion == CrossEntropy():
        return _cross_entropies
    return torch.vmap(criterion)


def _cross_entropies(output: Any, y: Tensor) -> Tensor:
    """Cross-entropy of every row. With the classes in front its softmax is several times as fast as with few behind."""
    if isinstance(output, tuple):
        return torch.stack([_cross_entropies(head, y) for head in output]).sum(0)
    scores = output.movedim(2, 0).flatten(1).log_softmax(0)
    losses = F.nll_loss(scores.T, y.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(len(y), -1).sum(1) / (y != IGNORED).flatten(1).sum(1)


LOSSES: dict[str, Callable[..., Criterion]] = {
    "cross_entropy": CrossEntropy,
    "ohem": HardestPixels,
    "mse": SquaredError,
    "bce": BinaryCrossEntropy,
}
"""The losses by name."""


def loss_of(text: str) -> Criterion:
    """The loss that `text` names, such as "cross_entropy(label_smoothing=0.1)"."""
    return build("loss", parse(text), LOSSES)
