"""CutMix (Yun et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedflat.core.devices import on
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local, SetupView
from fedflat.parts.mixup import mixed
from fedflat.parts.requirements import require_images, require_mixable, two_samples


@dataclass(frozen=True)
class CutMix(Part):
    """Paste a box of another image of the batch into every image; weight the two labels by their pixels.

    One box and one permutation π per minibatch, for both passes of sharpness-aware gradients.
    Keeps nothing; sends 1 down, 1 up.

    Args:
        beta: β; 0 or less is FedAvg.
    """

    formula: ClassVar[str] = (
        "λ ~ Beta(β, β),  a box of sides √(1 − λ) (H, W) around a uniform centre, clipped, from x_π\n"
        "λ ← 1 − box/(H W),  L = λ CE(z, y) + (1 − λ) CE(z, y_π)"
    )
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = -2  # after cutout, before mixup
    beta: float = 1.0

    def check(self, setup: SetupView) -> None:
        require_images(self.name, setup)
        require_mixable(self.name, setup)
        self.require(two_samples(setup)[1].dim() == 1, "mixes labels of whole images, not of pixels: leave it out")

    def batch(self, local: Local, batch: Batch) -> Batch:
        if self.beta <= 0:
            return batch
        rng, (height, width) = local.numpy_stream(self.name), batch.x.shape[2:]
        side = math.sqrt(1 - rng.beta(self.beta, self.beta))
        rows, columns = (span(int(rng.integers(length)), int(side * length), length) for length in (height, width))
        pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
        if pasted == 0:
            return batch
        x, order = batch.x.clone(), on(torch.from_numpy(rng.permutation(len(batch.x))), local.theta.device)
        x[:, :, rows, columns] = batch.x[:, :, rows, columns][order]
        return Batch(x, mixed(batch.targets, 1 - pasted / (height * width), order))


def span(centre: int, side: int, length: int) -> slice:
    """`side` positions (one less if odd) around `centre`, clipped to `length`."""
    return slice(max(0, centre - side // 2), min(length, centre + side // 2))
