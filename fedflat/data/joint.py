"""Augmentation of images together with their masks, where they have any."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.samples import IGNORED
from fedflat.core.streams import Stream
from fedflat.data.preprocess import Preprocess

GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class JointPreprocess(Preprocess):
    """Normalise images; in training first mirror, scale and crop each with its mask, and change its colours.

    The probability `flip` counts for both. scales: an image is enlarged by a factor drawn between these two and cropped
    at a random place; where it becomes smaller than the crop, the border is black and its labels are ignored.
    jitter: brightness, contrast and saturation change by factors between 1 − jitter and 1 + jitter. times: how many
    times as high and as wide as the crop the images are.
    """

    scales: tuple[float, float] = (1.0, 1.0)
    jitter: float = 0.0
    times: int = field(default=1, repr=False)  # the size of the samples tells it

    def __call__(self, x: Tensor, stream: Stream | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs; what is drawn was drawn by `pair`."""
        return super().__call__(x, None, dtype)

    def pair(self, x: Tensor, y: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        """Images as bytes and their labels, both changed."""
        count = len(x)
        mirrored = stream.uniform(count) < self.flip if self.flip else torch.zeros(count, dtype=torch.bool)
        if self.scales == (1.0, 1.0) and self.times == 1:
            places = mirrored.nonzero().view(-1)
            x, y = x.clone(), y.clone()
            x[places] = x[places].flip(-1)
            if y.dim() > 1:
                y[places] = y[places].flip(-1)
        else:
            x, y = self._cropped(x, y, mirrored, stream)
        return (self._coloured(x, stream), y) if self.jitter else (x, y)

    def _cropped(self, x: Tensor, y: Tensor, mirrored: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        low, high = self.scales
        window = 1 / (self.times * (low + (high - low) * stream.uniform(len(x))))  # share of the side in the crop
        shift = (2 * stream.uniform((2, len(x))) - 1) * (1 - window).abs()
        turn = torch.where(mirrored, -1.0, 1.0)
        zero = torch.zeros_like(window)
        rows = torch.stack(
            [torch.stack([window * turn, zero, shift[0]], 1), torch.stack([zero, window, shift[1]], 1)], 1
        )
        size = [len(x), 1, x.shape[-2] // self.times, x.shape[-1] // self.times]
        grid = F.affine_grid(rows, size, align_corners=False)
        image = F.grid_sample(x.float(), grid, mode="bilinear", align_corners=False)
        if y.dim() == 1:  # labels of whole images
            return image.round().to(torch.uint8), y
        labels = torch.where(y == IGNORED, -1, y)[:, None] + 1  # so that what lies outside is 0, ignored
        mask = F.grid_sample(labels.float(), grid, mode="nearest", align_corners=False)[:, 0].round().long() - 1
        return image.round().to(torch.uint8), torch.where(mask < 0, IGNORED, mask)

    def _coloured(self, x: Tensor, stream: Stream) -> Tensor:
        factors = 1 + self.jitter * (2 * stream.uniform((3, len(x), 1, 1, 1)) - 1)
        image = x.float() * factors[0]
        grey = (image * torch.tensor(GREY)[:, None, None]).sum(1, keepdim=True)
        image = grey.mean(dim=(2, 3), keepdim=True) * (1 - factors[1]) + image * factors[1]
        grey = (image * torch.tensor(GREY)[:, None, None]).sum(1, keepdim=True)
        return (grey * (1 - factors[2]) + image * factors[2]).clamp(0, 255).round().to(torch.uint8)
