"""Cutout (DeVries and Taylor, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.method import Batch, Local, Part
from fedflat.parts.inputs import require_images

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class Cutout(Part):
    """Hide a square of every image behind 0, the mean colour of normalised images.

    size: s (16 for CIFAR-10, 8 for CIFAR-100); 0 is FedAvg. Every image of a minibatch has a centre of its own.
    The last step of an image's own augmentation, after crop, mirror and normalisation; before mixup and cutmix, which
    mix finished images: a hole in the mixture would hide of both, and the labels' weights would not be the pixels'.
    Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = (
        "x̃ = 0 on rows [c_y − ⌊s/2⌋, c_y + ⌊s/2⌋) and columns likewise,  within the image\n(c_y, c_x) a uniform pixel"
    )
    rank: ClassVar[int] = -3
    size: int = 16

    def __post_init__(self) -> None:
        self.require(self.size >= 0, f"size must not be negative, got {self.size}")

    def check(self, task: Task) -> None:
        """The hole must be smaller than the images."""
        _, height, width = require_images(self.name, task)
        side = min(height, width)
        self.require(
            self.size <= side, f"size={self.size} hides whole images of {height}×{width}; try size={side // 2}"
        )

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Cut one hole into every image."""
        if self.size < 2:
            return batch
        count, _, *sides = batch.x.shape
        centres = torch.from_numpy(local.numpy_stream(self.name).integers(sides, size=(count, 2)))
        rows, columns = (self.hidden(centres[:, axis], length) for axis, length in enumerate(sides))
        hole = rows[:, None, :, None] & columns[:, None, None, :]
        return Batch(batch.x.clone().masked_fill_(hole, 0), batch.targets)  # a clone keeps the layout in memory

    def hidden(self, centres: Tensor, length: int) -> Tensor:
        """Which of `length` places lie in the holes around the centres, one row each."""
        offset = torch.arange(length) - centres[:, None]
        return (offset >= -(self.size // 2)) & (offset < self.size // 2)
