"""What parts that change the minibatch ask of the data, each with an error that names the part and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedflat.errors import InputError

if TYPE_CHECKING:
    from fedflat.task import Task


def two_samples(task: Task) -> tuple[Any, Tensor]:
    """A batch to try things out on, as the model gets it, with its targets: a client's first sample, twice."""
    x, y = task.federation.samples(0).batch(torch.zeros(2, dtype=torch.int64))
    return task.federation.preprocess(x, None, task.model.theta.dtype), y


def require_numbers(who: str, task: Task) -> Tensor:
    """The inputs are tensors of real numbers; returns two samples."""
    x, _ = two_samples(task)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{who} works on tensors of real numbers, but the inputs are {kind}: leave it out")
    return x


def require_images(who: str, task: Task) -> tuple[int, int, int]:
    """The inputs are images; returns channels, height and width."""
    x = require_numbers(who, task)
    if x.dim() != 4:
        raise InputError(f"{who} works on images (channels, height, width), not on {tuple(x.shape[1:])}: leave it out")
    return x.shape[1], x.shape[2], x.shape[3]


def require_mixable(who: str, task: Task) -> None:
    """Labels can be mixed: the loss of a mixed label is the mixture of the losses."""
    if getattr(task.criterion, "label_smoothing", 0):
        raise InputError(f"{who} mixes labels, which softens them already: give a loss without label_smoothing")
