"""Cutout (DeVries and Taylor, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.devices import on
from fedflat.core.fields import Natural
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local, SetupView
from fedflat.parts.requirements import require_images


@dataclass(frozen=True)
class Cutout(Part):
    """Set a square of every image to 0, the mean colour of normalised images.

    Every image of a minibatch has its own centre. Cutout is the last step of an image's own augmentation, after crop,
    mirror and normalisation. It acts before mixup and cutmix, which mix finished images: a hole in the mixture would
    hide pixels of both, and the labels' weights would not be those of the pixels. Keeps nothing; sends 1 down, 1 up.

    Args:
        size: s, the side of the square (16 for CIFAR-10, 8 for CIFAR-100); 0 is FedAvg.
    """

    formula: ClassVar[str] = (
        "x̃ = 0 on rows [c_y − ⌊s/2⌋, c_y + ⌊s/2⌋) and columns likewise,  within the image\n(c_y, c_x) a uniform pixel"
    )
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = -3
    size: Natural = 16

    def check(self, setup: SetupView) -> None:
        _, height, width = require_images(self.name, setup)
        side = min(height, width)
        self.require(
            self.size <= side, f"size={self.size} hides whole images of {height}×{width}; try size={side // 2}"
        )

    def batch(self, local: Local, batch: Batch) -> Batch:
        if self.size < 2:
            return batch
        count, _, *sides = batch.x.shape
        drawn = torch.from_numpy(local.numpy_stream(self.name).integers(sides, size=(count, 2)))
        centres = on(drawn, local.theta.device)
        rows, columns = (self.hidden(centres[:, axis], length) for axis, length in enumerate(sides))
        hole = rows[:, None, :, None] & columns[:, None, None, :]
        return Batch(batch.x.clone().masked_fill_(hole, 0), batch.targets)  # a clone keeps the layout in memory

    def hidden(self, centres: Tensor, length: int) -> Tensor:
        """Which of `length` positions lie in the holes around the centres, one row per centre."""
        offset = torch.arange(length, device=centres.device) - centres[:, None]
        return (offset >= -(self.size // 2)) & (offset < self.size // 2)
