"""Frost from photographs of ice, as in the published files of CIFAR-10-C, for users who have the photographs.

corrupt(images, "frost", 5, table=CORRUPTIONS | {"frost": photographed_frost("folder")})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedflat.analysis.corrupted import CORRUPTIONS, GREY, Corruption
from fedflat.analysis.image_filters import Random
from fedflat.errors import InputError
from fedflat.extras import needed

DRAWN = (1, 2, 3, 4, 5)  # there is a sixth photograph, which was never drawn
LARGE = 300  # pixels; a larger photograph is the original, of which every fifth pixel is used


def photographed_frost(folder: str | Path) -> Corruption:
    """The corruption `frost` with the photographs frost1 to frost5 (.png or .jpg) of a folder.

    Raises:
        InputError: A photograph is missing or cannot be read.
    """
    textures = [photograph(Path(folder), number) for number in DRAWN]

    def change(x: Tensor, image: float, ice: float, *, random: Random) -> Tensor:
        chosen = [textures[place] for place in random.integers(len(textures), size=len(x))]
        return image * x + ice * torch.stack([_somewhere(texture, x, random.random(2)) for texture in chosen])

    return replace(CORRUPTIONS["frost"], faith="in law", change=change)


def photograph(folder: Path, number: int) -> Tensor:
    """A photograph (3, H, W) from 0 to 1."""
    pillow = needed("PIL.Image", "Pillow, which reads photographs of ice,", "report")
    path = next((p for end in ("png", "jpg") if (p := folder / f"frost{number}.{end}").exists()), None)
    if path is None:
        raise InputError(f"{folder} has no frost{number}.png or frost{number}.jpg: frost needs frost1 to frost5")
    try:
        pixels = np.asarray(pillow.open(path).convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if min(pixels.shape[:2]) > LARGE:
        pixels = pixels[2::5, 2::5]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).double() / 255


def _somewhere(texture: Tensor, like: Tensor, place: Sequence[float] | np.ndarray) -> Tensor:
    """A part of the texture of the size of an image, its corner at these shares of the way; repeated if too small."""
    room = (max(have - want, 1) for have, want in zip(texture.shape[1:], like.shape[2:], strict=True))
    row, column = (int(share * each) for share, each in zip(place, room, strict=True))
    return window(texture, like, row, column)


def window(texture: Tensor, like: Tensor, row: int, column: int) -> Tensor:
    """The part of a texture with this corner, of the size of the images and grey if they are."""
    rows = torch.arange(row, row + like.shape[2]) % texture.shape[1]
    columns = torch.arange(column, column + like.shape[3]) % texture.shape[2]
    part = texture[:, rows][:, :, columns]
    return part if like.shape[1] == 3 else (part * GREY[0]).sum(0, keepdim=True)
