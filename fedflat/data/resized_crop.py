"""The random resized crop with which networks are trained on photographs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.devices import on
from fedflat.core.streams import Stream
from fedflat.data.preprocess import Preprocess

TRIES = 10  # draws of a shape before the whole image is taken


def stored_side(pixels: int) -> int:
    """The side at which an image is kept so that its centre crop has `pixels`: 256 for 224."""
    return math.ceil(8 * pixels / 7)


@dataclass(frozen=True)
class ResizedCrop(Preprocess):
    """Crop seven eighths of the side of a square image, 224 of 256 pixels: at random in training, else from the centre.

    The crop of training has a random area and shape and is resized; half of the crops are mirrored if `flip` is 0.5.

    area: share of the image's area, drawn between these two. ratio: width ÷ height, drawn between these two so that
    wide and high crops are equally likely. random: whether training crops at random, too.
    """

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    random: bool = True

    def __call__(self, x: Tensor, stream: Stream | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs; in training `pair` has cropped the images."""
        if (stream is None or not self.random) and isinstance(x, Tensor) and x.dtype == torch.uint8:
            side = x.shape[-1] * 7 // 8
            first = (x.shape[-1] - side) // 2
            x = x[..., first : first + side, first : first + side]
        return super().__call__(x, None, dtype)

    def pair(self, x: Tensor, y: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        """Cropped images as bytes, and their labels."""
        if not self.random:
            return x, y
        width, height = self._windows(len(x), stream)
        shift = (2 * stream.uniform((2, len(x))) - 1) * (1 - torch.stack([width, height]))
        turn = torch.where(stream.uniform(len(x)) < self.flip, -1.0, 1.0)
        zero = torch.zeros_like(width)
        across, down = torch.stack([width * turn, zero, shift[0]], 1), torch.stack([zero, height, shift[1]], 1)
        side = x.shape[-1] * 7 // 8
        grid = F.affine_grid(torch.stack([across, down], 1), [len(x), 1, side, side], align_corners=False)
        image = F.grid_sample(
            x.float(), on(grid, x.device), mode="bilinear", padding_mode="border", align_corners=False
        )
        return image.round().to(torch.uint8), y

    def _windows(self, count: int, stream: Stream) -> tuple[Tensor, Tensor]:
        """Width and height of the crops as shares of the side: the first of several draws that lies in the image."""
        drawn = stream.uniform((2, TRIES, count))
        area = self.area[0] + (self.area[1] - self.area[0]) * drawn[0]
        low, high = (math.log(value) for value in self.ratio)
        ratio = torch.exp(low + (high - low) * drawn[1])
        sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()])
        fits = (sides <= 1).all(dim=0)
        chosen = sides.gather(1, fits.int().argmax(dim=0).expand(2, 1, count))[:, 0]
        width, height = torch.where(fits.any(dim=0), chosen, 1.0)
        return width, height
