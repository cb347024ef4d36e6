"""Image files, in folders by class or in Tiny-ImageNet's layout. Pillow is imported only when one is read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedflat.data.readers import read_bytes, regular
from fedflat.errors import DataError, InputError

SUFFIXES = {".png", ".jpg", ".jpeg"}


def decode(file: Path | BinaryIO, name: str, size: int | None = None) -> np.ndarray:
    """One image as uint8 (H, W, 3), grey ones too; resized to a square of `size` if given."""
    image_module = _pillow()
    try:
        with image_module.open(regular(file) if isinstance(file, Path) else file) as image:
            if image.width * image.height > (image_module.MAX_IMAGE_PIXELS or math.inf):
                raise DataError(f"{name} has {image.width}×{image.height} pixels, more than Pillow's limit: shrink it")
            coloured = image.convert("RGB")
            return np.asarray(
                coloured if size is None else coloured.resize((size, size), image_module.Resampling.BILINEAR)
            )
    except FileNotFoundError:
        raise DataError(f"{name} is missing") from None
    except DataError:
        raise
    except Exception as error:  # a damaged image raises nearly anything; one that is far too large, a "bomb" error
        raise DataError(f"{name} is not a readable image: {error or type(error).__name__}") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("reading image files needs Pillow: pip install pillow") from None
    return Image


def decode_all(paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as uint8 (N, 3, size, size), channels-last in memory."""
    try:
        out = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    except (MemoryError, ValueError):
        wanted = f"{len(paths)} images of {size}×{size} pixels need {3 * len(paths) * size**2 >> 20} MB"
        raise DataError(f"{wanted}, more memory than there is: choose a smaller size") from None

    def read(place: int) -> None:
        out[place] = decode(paths[place], str(paths[place]), size)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(read, range(len(paths))):
            pass
    return out.transpose(0, 3, 1, 2)


def read_class_folders(folder: Path, classes: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of `folder/CLASS/*.png|jpg`; a folder that is not among the classes is an error."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; expected one folder per class in it")
    unknown = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes)
    if unknown:
        raise DataError(f"{folder}: class {unknown[0]!r} is not among the training classes")
    paths = [sorted(p for p in (folder / name).glob("*") if p.suffix.lower() in SUFFIXES) for name in classes]
    if not any(paths):
        raise DataError(f"{folder} holds no .png or .jpg image in any class folder")
    labels = np.repeat(np.arange(len(classes)), [len(part) for part in paths])
    return decode_all([path for part in paths for path in part], size), labels


def read_tiny_imagenet(
    folder: Path,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], int]:
    """Training and validation images and the number of classes; a label is the rank of its wnid."""
    wnids = sorted(_text(folder / "wnids.txt").split())
    rank = {wnid: label for label, wnid in enumerate(wnids)}
    parts = [sorted((folder / "train" / wnid / "images").glob("*.JPEG")) for wnid in wnids]
    for wnid, part in zip(wnids, parts, strict=True):
        if not part:
            raise DataError(f"{folder / 'train' / wnid / 'images'} holds no .JPEG image")
    labels = np.repeat(np.arange(len(wnids)), [len(part) for part in parts])
    annotations = folder / "val" / "val_annotations.txt"
    if not annotations.exists():
        raise DataError(f"{annotations} is missing")
    rows = [line.split("\t") for line in _text(annotations).splitlines() if line.strip()]
    if any(len(row) < 2 or row[1] not in rank for row in rows):
        bad = next(row for row in rows if len(row) < 2 or row[1] not in rank)
        raise DataError(f"{annotations}: cannot use the line {' '.join(bad)!r}")
    train = decode_all([path for part in parts for path in part], 64), labels
    test = decode_all([folder / "val" / "images" / row[0] for row in rows], 64)
    return train, (test, np.array([rank[row[1]] for row in rows])), len(wnids)


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from None
