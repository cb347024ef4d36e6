"""CutMix (Yun et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedflat.method import Batch, Local, Part
from fedflat.parts.inputs import require_images, require_mixable, two_samples
from fedflat.parts.mixup import mixed

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class CutMix(Part):
    """Paste a box of another image of the batch into every image; labels count by the pixels that are left.

    beta: β; 0 or less is FedAvg. One box and one permutation π a minibatch, the same in both passes of
    sharpness-aware gradients. Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = (
        "λ ~ Beta(β, β),  a box of sides √(1 − λ) (H, W) around a uniform centre, clipped, from x_π\n"
        "λ ← 1 − box/(H W),  L = λ CE(z, y) + (1 − λ) CE(z, y_π)"
    )
    rank: ClassVar[int] = -2  # after cutout, before mixup
    beta: float = 1.0

    def check(self, task: Task) -> None:
        """Images with one label each."""
        require_images(self.name, task)
        require_mixable(self.name, task)
        self.require(two_samples(task)[1].dim() == 1, "mixes labels of whole images, not of pixels: leave it out")

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Paste the box."""
        if self.beta <= 0:
            return batch
        rng, (height, width) = local.numpy_stream(self.name), batch.x.shape[2:]
        side = math.sqrt(1 - rng.beta(self.beta, self.beta))
        rows, columns = (span(int(rng.integers(length)), int(side * length), length) for length in (height, width))
        pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
        if pasted == 0:
            return batch
        x, order = batch.x.clone(), torch.from_numpy(rng.permutation(len(batch.x)))
        x[:, :, rows, columns] = batch.x[:, :, rows, columns][order]
        return Batch(x, mixed(batch.targets, 1 - pasted / (height * width), order))


def span(centre: int, side: int, length: int) -> slice:
    """`side` places (one less if odd) around `centre`, as far as they lie within `length`."""
    return slice(max(0, centre - side // 2), min(length, centre + side // 2))
