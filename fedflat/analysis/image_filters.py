"""Linear filters, motion, warps and random fields for batches of images (N, C, H, W), vectorised over the images.

A separable filter is a pair of matrices, one over rows and one over columns: `apply(x, A, B)` is A·x·Bᵀ.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Random = np.random.Generator
FIXED = 22  # bits after the point of the weights with which Pillow resizes


def apply(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A separable filter."""
    return rows @ x @ columns.mT


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float = 4.0, mirror: bool = False) -> Tensor:
    """A Gaussian blur of one axis; beyond the border the last pixel goes on, or the image is mirrored."""
    reach = int(truncate * sigma + 0.5)
    steps = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (steps.double() / max(sigma, 1e-9)) ** 2)
    places = torch.arange(size)[:, None] + steps
    if mirror:
        places = places.remainder(2 * size)
        places = torch.minimum(places, 2 * size - 1 - places)
    weights = (weights / weights.sum()).expand(size, -1)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, places.clamp(0, size - 1), weights)


def blur(x: Tensor, sigma: float, truncate: float = 4.0, mirror: bool = False) -> Tensor:
    """A Gaussian blur of every channel."""
    if sigma <= 0:
        return x
    return apply(x, *(gaussian_matrix(size, sigma, truncate, mirror) for size in x.shape[-2:]))


@lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """One axis of an enlargement about the centre: ⌈size/factor⌉ pixels become `size` by linear interpolation."""
    crop = math.ceil(size / factor)
    large = round(crop * factor)
    places = (torch.arange(size) + (large - size) // 2).double() * ((crop - 1) / max(large - 1, 1))
    below = places.floor().clamp(max=max(crop - 2, 0))
    matrix = torch.zeros(size, size, dtype=torch.float64)
    first = (below.long() + (size - crop) // 2)[:, None]
    matrix.scatter_add_(1, first, (1 - (places - below))[:, None])
    return matrix.scatter_add_(1, (first + 1).clamp(max=size - 1), (places - below)[:, None])


def zoom(x: Tensor, factor: float) -> Tensor:
    """The centre, enlarged by a factor to the size of the image."""
    return apply(x, *(zoom_matrix(size, factor) for size in x.shape[-2:]))


@lru_cache(maxsize=64)
def box_matrix(size: int, wanted: int) -> Tensor:
    """One axis of Pillow's resizing with a box, whose weights are whole multiples of 2⁻²²."""
    scale = size / wanted
    half = 0.5 * max(scale, 1.0)
    matrix = torch.zeros(wanted, size, dtype=torch.float64)
    for place in range(wanted):
        centre = (place + 0.5) * scale
        first, last = max(0, int(centre - half + 0.5)), min(size, int(centre + half + 0.5))
        offset = (torch.arange(first, last).double() - centre + 0.5) / max(scale, 1.0)
        inside = ((offset > -0.5) & (offset <= 0.5)).double()
        matrix[place, first:last] = (inside / inside.sum() * 2**FIXED + 0.5).floor()
    return matrix


def resize(levels: Tensor, height: int, width: int) -> Tensor:
    """Levels 0–255 of another size, by a box; columns first, and whole levels after each axis, as Pillow does."""
    for axis, wanted in ((3, width), (2, height)):
        size = levels.shape[axis]
        if wanted != size:
            sums = box_matrix(size, wanted) @ levels.mT if axis == 3 else box_matrix(size, wanted) @ levels
            levels = ((sums + 2 ** (FIXED - 1)) / 2**FIXED).floor().clamp(0, 255)
            levels = levels.mT if axis == 3 else levels
    return levels


def disk_blur(x: Tensor, radius: float, alias: float) -> Tensor:
    """A disk of this radius, its edge smoothed by a 3×3 Gaussian; borders are mirrored about their last pixel."""
    reach = int(radius) + 1
    axis = torch.arange(-reach, reach + 1).double()
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).double()
    edge = torch.exp(-(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64) ** 2) / (2 * alias**2))
    edge /= edge.sum()
    kernel = F.conv2d((disk / disk.sum())[None, None], torch.outer(edge, edge)[None, None], padding=1)
    planes = x.flatten(0, 1)[:, None]
    return F.conv2d(F.pad(planes, (reach,) * 4, mode="reflect"), kernel).view_as(x)


def motion(x: Tensor, radius: int, sigma: float, angles: np.ndarray) -> Tensor:
    """Half a Gaussian along a line of whole pixels, one angle in degrees per image; the border pixel goes on."""
    count, channels, height, width = x.shape
    steps = np.arange(min(2 * radius + 1, math.ceil(4 * sigma) + 1))
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    turn = np.deg2rad(angles)[:, None]
    right, down = (torch.from_numpy(np.ceil(steps * part - 0.5)).long() for part in (np.cos(turn), np.sin(turn)))
    flat, out = x.flatten(2), torch.zeros_like(x).flatten(2)
    for step, weight in enumerate((weights / weights.sum()).tolist()):
        row = (torch.arange(height) + down[:, step, None]).clamp_(0, height - 1) * width
        column = (torch.arange(width) + right[:, step, None]).clamp_(0, width - 1)
        place = (row[:, :, None] + column[:, None]).view(count, 1, -1).expand(-1, channels, -1)
        out.add_(flat.gather(2, place), alpha=weight)
    return out.view_as(x)


def sample(x: Tensor, rows: Tensor, columns: Tensor, about_pixels: bool) -> Tensor:
    """Linear interpolation at places (N, H, W); mirrored about the border's pixels, or about the border itself."""
    height, width = x.shape[-2:]
    if about_pixels:
        grid = torch.stack([2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1], -1)
    else:
        grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    return F.grid_sample(x, grid.to(x.dtype), "bilinear", "reflection", align_corners=about_pixels)


def plasma(like: Tensor, decay: float, random: Random) -> Tensor:
    """Fractal fields (N, 1, H, W) for images `like` these, from 0 to 1 by diamonds and squares on a torus.

    The noise of a level is uniform in ±w² with w = 100, 100/decay, 100/decay² …
    """
    count, _, height, width = like.shape
    size = 1 << max(height - 1, width - 1, 1).bit_length()
    field = np.zeros((count, size, size))
    step, wide = size, 100.0
    while step > 1:
        half, spread = step // 2, wide**2

        def noise(spread: float = spread, side: int = size // step) -> np.ndarray:
            return random.uniform(-spread, spread, (count, side, side))

        corner = field[:, ::step, ::step]
        rows = corner + np.roll(corner, -1, 1)
        centre = (rows + np.roll(rows, -1, 2)) / 4 + noise()
        field[:, half::step, half::step] = centre
        beside = corner + np.roll(corner, -1, 2)
        field[:, ::step, half::step] = (centre + np.roll(centre, 1, 1) + beside) / 4 + noise()
        field[:, half::step, ::step] = (centre + np.roll(centre, 1, 2) + rows) / 4 + noise()
        step, wide = half, wide / decay
    field -= field.min((1, 2), keepdims=True)
    field /= field.max((1, 2), keepdims=True)
    return torch.from_numpy(field[:, None, :height, :width])
