"""From stored samples to model inputs: normalisation and augmentation, vectorised over the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.devices import on
from fedflat.core.streams import Stream
from fedflat.errors import InputError


@dataclass(frozen=True)
class Preprocess:
    """Normalise uint8 images, and mirror and crop them while training. Other inputs pass as they are.

    mean, std: of each channel, in units of `scale` (one number serves all channels). scale: the value that
    stands for 1. flip: probability of a mirror image. pad: width of the border that a crop may reach into; 0
    for no crop. crop: probability of a crop. black: the border is black and then normalised, as when padding
    comes before normalisation; otherwise the border is 0 in the result, the mean colour, as when padding
    comes after it.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 255.0
    flip: float = 0.0
    pad: int = 0
    crop: float = 1.0
    black: bool = True

    @property
    def draws(self) -> bool:
        """Whether augmentation draws at random."""
        return bool(self.flip or self.pad)

    def __call__(self, x: Tensor, stream: Stream | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs from a raw batch.

        stream: the source of every draw; None means evaluation, which normalises only. uint8 comes out as
        `dtype`, images (B, C, H, W) channels-last in memory. Floating point is cast to `dtype` but not
        scaled; other integers (tokens) stay as they are.
        """
        images = len(x) if isinstance(x, Tensor) and x.dtype == torch.uint8 and x.dim() == 4 else 0
        draws = self.draw([images], stream) if stream is not None and images and self.draws else None
        return self.prepared(x, draws, dtype)

    def draw(self, counts: Iterable[int], stream: Stream) -> Draws:
        """What augmentation draws for so many images, and then for so many more, ….

        >>> from fedflat.core.streams import stream
        >>> Preprocess(flip=0.5, pad=4).draw([2, 3], stream(0, "augment")).down.shape
        (5,)
        """
        return Draws(*np.concatenate([self._draw(count, stream) for count in counts], 1))

    def _draw(self, count: int, stream: Stream) -> np.ndarray[Any, Any]:
        """Whether each image is mirrored, and where its window is."""
        drawn = np.zeros((3, count), np.int64)
        if self.flip:
            drawn[0] = stream.uniform(count).numpy() < self.flip
        if self.pad:
            drawn[1:] = stream.integers(2 * self.pad + 1, (2, count)).numpy()
            if self.crop < 1:
                drawn[1:, stream.uniform(count).numpy() >= self.crop] = self.pad
        return drawn

    def prepared(self, x: Tensor, draws: Draws | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Model inputs from a raw batch and what was drawn for it; with None they are normalised only."""
        if not isinstance(x, Tensor) or x.dtype != torch.uint8:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype else x
        if x.dim() != 4:
            return self._normalise_plain(x, dtype)
        pixels = x.permute(0, 2, 3, 1).contiguous()
        batch, height, width, channels = pixels.shape
        tables = _tables(self, height, width, channels, dtype, x.device)
        if draws is not None and self.pad:
            out = self._crop(pixels, draws, tables)
        else:
            if draws is not None:
                mirrored, order = self._mirror_some(pixels, draws)
                pixels = torch.cat([pixels, mirrored]).index_select(0, on(torch.from_numpy(order), x.device))
            out = pixels.view(batch * height, width * channels).to(dtype).mul_(tables.scale).add_(tables.shift)
        return out.view(batch, height, width, channels).permute(0, 3, 1, 2)

    def _crop(self, pixels: Tensor, draws: Draws, tables: _Tables) -> Tensor:
        """Rows (B·H, W·C) of one window of each image with a border, some of them mirrored, normalised.

        A row of a window is a run of the images' memory, so all windows are one gather of overlapping rows. Where a
        window reaches over the border it reads what lies beside the row, which does not count: the scale is 0 there.
        Where windows start is computed by NumPy, whose calls take a fraction of PyTorch's.
        """
        batch, height, width, channels = pixels.shape
        length, (down, across) = width * channels, (draws.down, draws.across)
        mirrored, order = self._mirror_some(pixels, draws)
        edge = pixels.new_zeros(self.pad * channels)
        memory = torch.cat([edge, pixels.view(-1), mirrored.view(-1), edge])
        runs = memory.as_strided((memory.numel() - length + 1, length), (1, 1))
        starts = tables.starts.take(down, 0)
        starts += (order * (height * length) + across * channels)[:, None]
        rows = runs.index_select(0, on(torch.from_numpy(starts.reshape(-1)), pixels.device)).to(tables.scale.dtype)
        windows = rows.view(batch, height, length)
        scales, shifts = tables.bordered.index_select(0, on(torch.from_numpy(across), pixels.device)).chunk(2, 2)
        beyond = on(torch.from_numpy(np.flatnonzero(tables.beyond.take(down, 0))), rows.device)
        if self.black:
            windows.mul_(scales).add_(tables.shift)
            rows[beyond] = tables.shift
        else:  # the border must be 0: there is no shift, either
            torch.addcmul(shifts, windows, scales, out=windows)
            rows.index_fill_(0, beyond, 0.0)
        return rows

    @staticmethod
    def _mirror_some(pixels: Tensor, draws: Draws) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """Some images (B, H, W, C), mirrored from left to right; and where each image is if these follow `pixels`."""
        batch = len(pixels)
        where, order = np.flatnonzero(draws.mirrored), np.arange(batch)
        order[where] = np.arange(batch, batch + len(where))
        return pixels.index_select(0, on(torch.from_numpy(where), pixels.device)).flip(2), order

    def _normalise_plain(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if len(self.mean) != 1 or len(self.std) != 1:
            raise InputError(f"{len(self.mean)} channel means cannot be used on inputs of shape {tuple(x.shape[1:])}")
        return x.to(dtype).mul_(1 / (self.scale * self.std[0])).add_(-self.mean[0] / self.std[0])


@dataclass(frozen=True, eq=False)
class Draws:
    """What augmentation has drawn for each image: whether it is mirrored, and where its window begins, 0 … 2·pad."""

    mirrored: np.ndarray[Any, Any]
    down: np.ndarray[Any, Any]
    across: np.ndarray[Any, Any]

    def __getitem__(self, images: slice) -> Draws:
        return Draws(self.mirrored[images], self.down[images], self.across[images])


@dataclass(frozen=True, eq=False)
class _Tables:
    """What one image size needs again and again.

    scale, shift: of a row of pixels (W·C). The others have an entry for every place of a window, 0 … 2·pad. bordered:
    the scale and the shift of a row of a window, side by side, both 0 on the border. starts, beyond: where each row
    of a window starts within the image, and whether it is one of the border.
    """

    scale: Tensor
    shift: Tensor
    bordered: Tensor
    starts: np.ndarray[Any, Any]
    beyond: np.ndarray[Any, Any]


@lru_cache(maxsize=16)
def _tables(
    recipe: Preprocess, height: int, width: int, channels: int, dtype: torch.dtype, device: torch.device
) -> _Tables:
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (recipe.mean, recipe.std))
    if not {len(mean), len(std)} <= {1, channels}:
        raise InputError(f"{len(mean)} channel means and {len(std)} deviations for images of {channels} channels")
    scale = (1 / (recipe.scale * std)).expand(width, channels).reshape(-1).to(dtype)
    shift = (-mean / std).expand(width, channels).reshape(-1).to(dtype)
    places, border = np.arange(2 * recipe.pad + 1), recipe.pad * channels
    wide = [
        torch.nn.functional.pad(table, (border, border)).unfold(0, width * channels, channels)
        for table in (scale, shift)
    ]
    down = places[:, None] + np.arange(-recipe.pad, height - recipe.pad)
    return _Tables(
        scale.to(device),
        shift.to(device),
        torch.cat(wide, 1).unsqueeze(1).to(device),
        down.clip(0, height - 1) * width * channels,
        (down < 0) | (down >= height),
    )
