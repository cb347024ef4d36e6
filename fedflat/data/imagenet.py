"""ImageNet-200: the classes of ImageNet that FedAlign's authors drew, and images that are drawn as they say."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from fedflat.data.arrays import Pool, Targets
from fedflat.data.image_files import CACHE, Cache, ImageFiles, read_square
from fedflat.data.images import SUFFIXES
from fedflat.data.resized_crop import stored_side
from fedflat.data.sources import data_root
from fedflat.errors import DataError, InputError

log = logging.getLogger(__name__)
SEED, EVERY, CLASSES, IMAGES = 1993, 1000, 200, 500


def drawn_classes() -> list[str]:
    """The 200 classes of FedAlign's paper, in the order in which they were drawn from the 1000."""
    return resources.files("fedflat.data").joinpath("imagenet200.txt").read_text().split()


def imagenet200(
    root: Path | None, classes: int = CLASSES, images: int = IMAGES, pixels: int = 224, cache: int = CACHE
) -> Pool:
    """200 classes of ImageNet with 500 images each, as drawn for FedAlign (Mendieta et al., 2022), decoded when needed.

    Read from imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG; all validation images of the classes are the
    test set. classes: how many of the 200, in the order in which they were drawn. images: training images per class;
    which ones is drawn once and kept in imagenet/imagenet200_CLASSESxIMAGES.txt, which is used from then on. pixels:
    side of the images: a random resized crop in training, else the centre. cache: bytes of decoded images to keep.
    """
    if not 1 <= classes <= CLASSES or images < 1 or pixels < 8:
        raise InputError(f"imagenet200: classes must be 1 … {CLASSES}, images 1 or more, pixels 8 or more")
    home, names = data_root(root) / "imagenet", drawn_classes()[:classes]
    for split in ("train", "val"):
        absent = [name for name in names if not (home / split / name).is_dir()]
        if absent:
            raise DataError(
                f"data set imagenet200 is not here: {len(absent)} of {classes} classes have no folder in "
                f"{home / split}, first {absent[0]}; validation images need a folder per class, too; see --data-root"
            )
    train = _listed(home, names, images)
    test = [path for name in sorted(names) for path in _images(home / "val" / name)]
    kept, side = Cache(cache), stored_side(pixels)
    rank = {name: label for label, name in enumerate(sorted(names))}

    def files(paths: list[Path]) -> tuple[ImageFiles, torch.Tensor]:
        labels = torch.tensor([rank[path.parent.name] for path in paths])
        return ImageFiles(paths, labels, (side, side), kept, read=read_square), labels

    x, y = files(train)
    return Pool(x, y, *files(test), Targets(y.numpy(), classes))


def _listed(home: Path, names: list[str], images: int) -> list[Path]:
    """The training images of a list that is kept, or that is drawn now and kept."""
    file = home / f"imagenet200_{len(names)}x{images}.txt"
    if file.exists():
        paths = [home / line for line in file.read_text().splitlines()]
        absent = [path for path in paths if not path.exists()]
        if absent or {path.parent.name for path in paths} != set(names):
            what = f"{len(absent)} of {len(paths)} images are missing, first {absent[0]}" if absent else "other classes"
            raise DataError(f"{file}: {what}; remove the list to draw anew")
        return paths
    paths = _drawn(home / "train", names, images)
    try:
        file.write_text("".join(f"{path.relative_to(home)}\n" for path in paths))
        log.warning("imagenet200: %d training images were drawn; their list is kept in %s", len(paths), file)
    except OSError as error:
        log.warning("imagenet200: the list of images cannot be kept in %s (%s)", file, error.strerror)
    return paths


def _drawn(folder: Path, names: list[str], images: int) -> list[Path]:
    """So many images per class, drawn from their sorted names by the generator that drew the classes."""
    rng = np.random.RandomState(SEED)
    rng.choice(EVERY, CLASSES, replace=False)
    paths = []
    for name in names:
        found = _images(folder / name)
        if len(found) < images:
            raise DataError(f"{folder / name} holds {len(found)} images, fewer than images={images}")
        paths += [found[place] for place in rng.choice(len(found), images, replace=False)]
    return paths


def _images(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"{folder} holds no image")
    return found
