"""Images that are decoded when they are asked for, with a bounded memory of the last ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import DataError, InputError

CACHE = 256 << 20  # bytes of decoded images that a process keeps
AT_ONCE = 1 << 25  # numbers in a batch of evaluation


class Cache:
    """What was decoded last, up to so many bytes. Every worker process has its own."""

    def __init__(self, limit: int = CACHE) -> None:
        self.limit, self.bytes = limit, 0
        self._kept: OrderedDict[Any, np.ndarray] = OrderedDict()

    def get(self, key: Any, read: Callable[[], np.ndarray]) -> np.ndarray:
        """What `read` gave for this key before, or gives now."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = read()
        self._kept[key] = found
        self.bytes += found.nbytes
        while self.bytes > self.limit and self._kept:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def __getstate__(self) -> dict[str, Any]:
        """What travels to other processes: the limit, not the images."""
        return {"limit": self.limit, "bytes": 0, "_kept": OrderedDict()}


class ImageFiles:
    """Samples whose inputs are image files, and whose targets are labels or image files of class numbers.

    Args:
        paths: The image files.
        targets: A label per image, or a file of class numbers per image.
        size: Height and width to which images are resized (bicubic; class numbers by the nearest one).
        cache: Where decoded images are kept.
        table: The class of each value 0 … 255 in a file of class numbers; −100 for values that are ignored.
        read: Makes bytes (height, width, 3) of a file and the size.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        targets: Sequence[Path] | Tensor,
        size: tuple[int, int],
        cache: Cache,
        table: np.ndarray | None = None,
        read: Callable[[Path, tuple[int, int]], np.ndarray] | None = None,
    ) -> None:
        self.paths, self.targets, self.size, self.cache, self.table = paths, targets, size, cache, table
        self.read = read or read_image

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def at_once(self) -> int:
        """How many images to evaluate at once: fewer if they are large."""
        return max(1, AT_ONCE // (3 * self.size[0] * self.size[1]))

    def __getitem__(self, indices: Tensor) -> ImageFiles:
        """The samples at these positions."""
        paths, targets = [self.paths[i] for i in indices.tolist()], self.targets
        chosen = targets[indices] if isinstance(targets, Tensor) else [targets[i] for i in indices.tolist()]
        return ImageFiles(paths, chosen, self.size, self.cache, self.table, self.read)

    @property
    def labels(self) -> Tensor | None:
        """The label of every image; None where they are in files."""
        return self.targets if isinstance(self.targets, Tensor) else None

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (batch, 3, height, width) of bytes, and labels (batch,) or (batch, height, width)."""
        images = torch.from_numpy(np.stack([self._image(i) for i in indices.tolist()])).permute(0, 3, 1, 2)
        return images, self.targets_at(indices)

    def targets_at(self, indices: Tensor) -> Tensor:
        """The labels of a batch alone; no image is decoded for them."""
        if isinstance(self.targets, Tensor):
            return self.targets[indices]
        assert self.table is not None
        return torch.from_numpy(self.table[np.stack([self._mask(i) for i in indices.tolist()])])

    def _image(self, place: int) -> np.ndarray:
        path = self.paths[place]
        return self.cache.get(path, lambda: self.read(path, self.size))

    def _mask(self, place: int) -> np.ndarray:
        assert not isinstance(self.targets, Tensor)
        path, image = self.targets[place], self.paths[place]
        return self.cache.get(path, lambda: read_mask(path, image, self.size))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("reading image files needs Pillow: pip install pillow") from None
    return Image


def read_image(path: Path, size: tuple[int, int]) -> np.ndarray:
    """An image as bytes (height, width, 3), resized."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            resized = image.convert("RGB")
            if resized.size != size[::-1]:
                resized = resized.resize(size[::-1], pillow.Resampling.BICUBIC)
            return np.asarray(resized)
    except OSError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from None


def read_square(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The central square of an image as bytes (side, side, 3), resized."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            image.draft("RGB", size)  # a large JPEG is decoded at a half, a quarter or an eighth of its size
            side, (width, height) = min(image.size), image.size
            left, top = (width - side) / 2, (height - side) / 2
            whole, box = image.convert("RGB"), (left, top, left + side, top + side)
            return np.asarray(whole.resize(size, pillow.Resampling.BILINEAR, box=box))
    except OSError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from None


def read_mask(path: Path, image: Path, size: tuple[int, int]) -> np.ndarray:
    """Class numbers as bytes (height, width), resized; refused if the image has another size."""
    pillow = _pillow()
    try:
        with pillow.open(path) as mask, pillow.open(image) as whole:
            if mask.size != whole.size:
                raise DataError(
                    f"{path} is {mask.size[0]}×{mask.size[1]}, but its image is {whole.size[0]}×{whole.size[1]}"
                )
            numbers = mask if mask.mode in ("L", "P") else mask.convert("L")
            return np.asarray(numbers.resize(size[::-1], pillow.Resampling.NEAREST))
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from None
