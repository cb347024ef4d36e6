"""Corrupted images: 19 corruptions of 5 severities each, as in CIFAR-10-C (Hendrycks and Dietterich, 2019).

>>> import torch
>>> from fedflat.analysis.corrupted import corrupt
>>> images = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
>>> int(corrupt(images, "brightness", 5).max())
176

The parameters are those of CIFAR-10-C. `CORRUPTIONS[name].faith` says how near each comes to the published files:
"exact" gives the same pixels, "in law" draws other random numbers by the same rule, "approximate" follows another rule
of like effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.analysis import image_filters as filters
from fedflat.analysis.image_filters import Random, blur
from fedflat.core.devices import hosted
from fedflat.core.streams import numpy_stream
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import needed

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels; a smaller image has no centre to zoom into
BLOCK = 250  # images at a time, which bounds memory
GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).view(1, 3, 1, 1)


@dataclass(frozen=True)
class Corruption:
    """One corruption.

    Attributes:
        group: "noise", "blur", "weather" or "digital".
        faith: "exact", "in law" or "approximate"; see the module.
        change: Function of images (N, C, H, W) from 0 to 1, the parameters and a generator.
        severities: The parameters of severities 1 to 5.
    """

    group: str
    faith: str
    change: Callable[..., Tensor]
    severities: tuple[tuple[float, ...], ...]


def corrupt(
    images: Tensor, name: str, severity: int, *, seed: int = 0, table: Mapping[str, Corruption] | None = None
) -> Tensor:
    """Corrupted copies of images.

    Args:
        images: uint8, (N, C, H, W), of one or three channels and at least 8 × 8 pixels.
        name: A name in `CORRUPTIONS`.
        severity: 1 to 5; 0 returns the images.
        seed: Seed of every draw. The same images in the same order give the same result.
        table: Corruptions by name, if not `CORRUPTIONS`.

    Raises:
        InputError: The corruption or severity does not exist, or these are no such images.
    """
    table = CORRUPTIONS if table is None else table
    if name not in table:
        raise UnknownNameError("corruption", name, table)
    if severity not in (0, *SEVERITIES):
        raise InputError(f"severity must be a whole number from 1 to 5 (or 0 for no corruption), got {severity}")
    check_images(images)
    images = hosted(images)
    if severity == 0:
        return images.clone()
    chosen = table[name]
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for block, start in enumerate(range(0, len(images), BLOCK)):
        random = numpy_stream(seed, f"corruption {name}", severity, block)
        some = images[start : start + BLOCK].double() / 255
        changed = chosen.change(some, *chosen.severities[severity - 1], random=random)
        out[start : start + BLOCK] = (changed.clamp_(0, 1) * 255).to(torch.uint8)
    return out


def check_images(images: Any) -> None:
    """Raise an error unless these are images that can be corrupted."""
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
        kind = f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"corruptions need images as uint8 of shape (N, channels, height, width), got {kind}")
    channels, height, width = images.shape[1:]
    if channels not in (1, 3) or min(height, width) < SMALLEST:
        raise InputError(
            f"corruptions need images of 1 or 3 channels and at least {SMALLEST} × {SMALLEST} pixels, "
            f"got {channels} channels of {height} × {width}"
        )


def _levels(levels: Tensor) -> Tensor:
    """Whole levels as numbers from 0 to 1 that become the same levels again when cut off."""
    return (levels + 0.25) / 255


# ---- noise ----


def gaussian_noise(x: Tensor, sigma: float, *, random: Random) -> Tensor:
    """x + N(0, σ²)."""
    return x + sigma * torch.from_numpy(random.standard_normal(x.shape))


def shot_noise(x: Tensor, rate: float, *, random: Random) -> Tensor:
    """Poisson(rate·x)/rate."""
    return torch.from_numpy(random.poisson((x * rate).numpy()) / rate)


def impulse_noise(x: Tensor, amount: float, *, random: Random) -> Tensor:
    """A share of all values becomes 0 or 1."""
    draw = torch.from_numpy(random.random(x.shape))
    return torch.where(draw < amount, (draw < amount / 2).double(), x)


def speckle_noise(x: Tensor, sigma: float, *, random: Random) -> Tensor:
    """x + x·N(0, σ²)."""
    return x + x * sigma * torch.from_numpy(random.standard_normal(x.shape))


# ---- blur ----


def gaussian_blur(x: Tensor, sigma: float, *, random: Random) -> Tensor:
    """A Gaussian; the border pixel goes on."""
    return blur(x, sigma)


def defocus_blur(x: Tensor, radius: float, alias: float, *, random: Random) -> Tensor:
    """A disk with a smoothed edge."""
    return filters.disk_blur(x, radius, alias)


def glass_blur(x: Tensor, sigma: float, reach: float, times: float, *, random: Random) -> Tensor:
    """Blur, let pixels take the value of a near one, blur.

    The published files come from a swap that overwrites one pixel before it reads it, so it copies; so does this.
    """
    pixels = (blur(x, sigma) * 255).to(torch.uint8).permute(2, 3, 0, 1).contiguous().numpy()
    step, (height, width), every = int(reach), x.shape[-2:], np.arange(len(x))
    for _ in range(int(times)):
        moves = random.integers(-step, step, (2, height, width, len(x)), dtype=np.int8)
        for row in range(height - step, step, -1):
            for column in range(width - step, step, -1):
                down, right = moves[:, row, column]
                pixels[row, column] = pixels[row + down, column + right, every]
    return blur(torch.from_numpy(pixels).permute(2, 3, 0, 1).double() / 255, sigma)


def motion_blur(x: Tensor, radius: float, sigma: float, *, random: Random) -> Tensor:
    """Half a Gaussian along a line at −45° to 45°."""
    return _levels((filters.motion(x, int(radius), sigma, random.uniform(-45, 45, len(x))) * 255).round())


def zoom_blur(x: Tensor, top: float, *, random: Random) -> Tensor:
    """The mean of the image and its enlargements in steps of 1 %."""
    factors = np.arange(1, top, 0.01).tolist()
    return (x + sum(filters.zoom(x, factor) for factor in factors)) / (len(factors) + 1)


# ---- weather ----


def snow(
    x: Tensor, loc: float, scale: float, zoom: float, least: float, radius: float, sigma: float, blend: float,
    *, random: Random,
) -> Tensor:  # fmt: skip
    """Flakes: the peaks of noise, enlarged and blown by the wind, over a whitened image."""
    flakes = torch.from_numpy(random.normal(loc, scale, (len(x), 1, *x.shape[2:])))
    flakes = filters.zoom(flakes, zoom)
    flakes = torch.where(flakes < least, 0.0, flakes).clamp_(0, 1)
    flakes = filters.motion(flakes, int(radius), sigma, random.uniform(-135, -45, len(x)))
    grey = (x * GREY).sum(1, keepdim=True) if x.shape[1] == 3 else x
    white = blend * x + (1 - blend) * torch.maximum(x, grey * 1.5 + 0.5)
    return white + flakes + flakes.flip(2, 3)


def frost(x: Tensor, image: float, ice: float, *, random: Random) -> Tensor:
    """A bluish fractal over the image. The published files use photographs of ice: see `ice.photographed_frost`."""
    texture = 0.2 + 0.8 * filters.plasma(x, 1.6, random)
    return image * x + ice * texture * _coloured((0.85, 0.95, 1.0), x)


def fog(x: Tensor, strength: float, decay: float, *, random: Random) -> Tensor:
    """A fractal on top, scaled back to the brightness of the image."""
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * filters.plasma(x, decay, random)) * top / (top + strength)


def spatter(
    x: Tensor, loc: float, scale: float, sigma: float, least: float, strength: float, mud: float, *, random: Random
) -> Tensor:
    """Drops of water, or of mud, where smooth noise is high.

    The shine of the water is a simple one; the factor 0.4 gives it the strength of the published images.
    """
    drops = blur(torch.from_numpy(random.normal(loc, scale, (len(x), 1, *x.shape[2:]))), sigma)
    if mud:
        cover = blur((drops > least).double(), strength)
        cover = torch.where(cover < 0.8, 0.0, cover)
        return x * (1 - cover) + cover * _coloured((63 / 255, 42 / 255, 20 / 255), x)
    wet = torch.where(drops < least, 0.0, drops)
    water = wet * (wet - blur(wet.roll((1, 1), (2, 3)), 0.7)).clamp_min(0)  # brightest at the edge away from the light
    water = water / water.amax((1, 2, 3), keepdim=True).clamp_min(1e-9)
    return x + 0.4 * strength * water * _coloured((175 / 255, 238 / 255, 238 / 255), x)


def _coloured(colour: tuple[float, float, float], like: Tensor) -> Tensor:
    """A colour, or its brightness for grey images."""
    channels = torch.tensor(colour, dtype=torch.float64).view(1, 3, 1, 1)
    return channels if like.shape[1] == 3 else (channels * GREY).sum(1, keepdim=True)


# ---- digital ----


def brightness(x: Tensor, more: float, *, random: Random) -> Tensor:
    """The value of HSV grows; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)


def contrast(x: Tensor, factor: float, *, random: Random) -> Tensor:
    """Nearer to the mean of the channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def saturate(x: Tensor, times: float, more: float, *, random: Random) -> Tensor:
    """The saturation of HSV is scaled and raised; grey pixels count as red, grey images stay."""
    if x.shape[1] == 1:
        return _levels((x * 255).round())
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    spread = value - low
    share = torch.where(spread > 0, (value - x) / spread.clamp_min(1e-12), torch.tensor([0.0, 1, 1]).view(1, 3, 1, 1))
    saturation = (spread / value.clamp_min(1e-12) * times + more).clamp(0, 1)
    return value * (1 - saturation * share)


def jpeg_compression(x: Tensor, quality: float, *, random: Random) -> Tensor:
    """JPEG there and back, by Pillow."""
    pillow = needed("PIL.Image", "Pillow, which jpeg_compression needs,", "report")
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    out = []
    for each in pixels:
        file = BytesIO()
        pillow.fromarray(each.squeeze(-1) if each.shape[-1] == 1 else each).save(file, "JPEG", quality=int(quality))
        out.append(np.asarray(pillow.open(file)).reshape(each.shape))
    return _levels(torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).double())


def pixelate(x: Tensor, share: float, *, random: Random) -> Tensor:
    """Fewer pixels and back, by boxes."""
    height, width = x.shape[2:]
    small = filters.resize((x * 255).round(), int(height * share), int(width * share))
    return _levels(filters.resize(small, height, width))


def elastic_transform(x: Tensor, alpha: float, sigma: float, affine: float, *, random: Random) -> Tensor:
    """A random affine map, then a smooth random displacement; lengths are shares of the shorter side."""
    count, _, height, width = x.shape
    side = min(height, width)
    centre, third = np.array([height // 2, width // 2], float)[::-1], side // 3
    corners = centre + third * np.array([[1.0, 1], [1, -1], [-1, -1]])
    moved = corners + random.uniform(-affine * side, affine * side, (count, 3, 2))
    ones = np.ones((count, 3, 1))
    back = torch.from_numpy(np.linalg.solve(np.concatenate([moved, ones], 2), np.broadcast_to(corners, moved.shape)))
    rows, columns = (grid.double() for grid in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    source = torch.stack([columns, rows, torch.ones_like(rows)], -1).view(1, -1, 3) @ back
    across, down = source.view(count, height, width, 2).unbind(-1)
    x = filters.sample(x, down, across, about_pixels=True)
    if alpha == 0:
        return x
    shifts = torch.from_numpy(random.uniform(-1, 1, (2, count, height, width)))
    shifts = blur(shifts, sigma * side, truncate=3, mirror=True) * alpha * side
    return filters.sample(x, rows + shifts[0], columns + shifts[1], about_pixels=False)


def _each(*values: float) -> tuple[tuple[float, ...], ...]:
    return tuple((value,) for value in values)


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption("noise", "in law", gaussian_noise, _each(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Corruption("noise", "in law", shot_noise, _each(500, 250, 100, 75, 50)),
    "impulse_noise": Corruption("noise", "in law", impulse_noise, _each(0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": Corruption("noise", "in law", speckle_noise, _each(0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": Corruption("blur", "exact", gaussian_blur, _each(0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus_blur": Corruption(
        "blur", "exact", defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    ),
    "glass_blur": Corruption(
        "blur", "in law", glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
    ),
    "motion_blur": Corruption("blur", "in law", motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Corruption("blur", "exact", zoom_blur, _each(1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": Corruption(
        "weather",
        "in law",
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Corruption("weather", "approximate", frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": Corruption("weather", "in law", fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "spatter": Corruption(
        "weather",
        "approximate",
        spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
    ),
    "brightness": Corruption("digital", "exact", brightness, _each(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption("digital", "exact", contrast, _each(0.75, 0.5, 0.4, 0.3, 0.15)),
    "saturate": Corruption("digital", "exact", saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
    "jpeg_compression": Corruption("digital", "approximate", jpeg_compression, _each(80, 65, 58, 50, 40)),
    "pixelate": Corruption("digital", "exact", pixelate, _each(0.95, 0.9, 0.85, 0.75, 0.65)),
    "elastic_transform": Corruption(
        "digital",
        "in law",
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
}
