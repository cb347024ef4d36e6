"""The data sets by name. Each maker returns the whole `Pool`; dividing it is the partitioners' work."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from fedflat.data.arrays import Pool, make_pool
from fedflat.data.imagenet import imagenet200
from fedflat.data.images import read_class_folders, read_tiny_imagenet
from fedflat.data.readers import (
    Records,
    read_cifar_pickle,
    read_cifar_records,
    read_idx,
    read_parts,
    regular,
    unpack_limit,
)
from fedflat.data.sources import IDX_FILES, fetch, user_path
from fedflat.errors import DataError

CIFAR10_RECORDS = [10_000] * 6
CIFAR100_RECORDS = [50_000, 10_000]
CLASSES = 100_000  # a label beyond this, and beyond the number of samples, is a mistake
SIDE = 4096  # pixels of the largest image side that folder() resizes to


def digits(root: Path | None) -> Pool:
    """1797 handwritten digits of 8×8 pixels, values 0–16; embedded, nothing is downloaded.

    The test part of the UCI data set "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
    1998, doi 10.24432/C50P49, licence CC BY 4.0), as distributed with scikit-learn. Of each class every fifth
    sample is test.
    """
    with resources.files("fedflat.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        x, y = stored["x"][:, None], stored["y"].astype(np.int64)
    rank = np.empty(len(y), dtype=np.int64)
    for label in range(10):
        rank[y == label] = np.arange((y == label).sum())
    test = rank % 5 == 4
    return make_pool((x[~test], y[~test]), (x[test], y[test]), 10, "digits")


def cifar10(root: Path | None) -> Pool:
    """CIFAR-10: 50,000 + 10,000 colour images of 32×32 in 10 classes (Krizhevsky, 2009)."""
    folder = fetch("cifar10", root)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    if folder.name.endswith("-py"):
        read = partial(read_cifar_pickle, keys=("labels",))
    else:
        names, read = [f"{name}.bin" for name in names], partial(read_cifar_records, heads=1)
    parts = read_parts([folder / name for name in names], read, CIFAR10_RECORDS)
    train = np.concatenate([x for _, x in parts[:5]]), np.concatenate([y[:, 0] for y, _ in parts[:5]])
    return make_pool(train, (parts[5][1], parts[5][0][:, 0]), 10, str(folder))


def cifar100(root: Path | None) -> Pool:
    """CIFAR-100: 50,000 + 10,000 colour images of 32×32, 100 classes in 20 superclasses (Krizhevsky, 2009)."""
    folder = fetch("cifar100", root)
    if folder.name.endswith("-python"):
        paths = [folder / "train", folder / "test"]
        parts = read_parts(paths, partial(read_cifar_pickle, keys=("coarse_labels", "fine_labels")), CIFAR100_RECORDS)
    else:
        paths = [folder / "train.bin", folder / "test.bin"]
        parts = read_parts(paths, partial(read_cifar_records, heads=2), CIFAR100_RECORDS)
    (heads, x), (test_heads, test_x) = parts
    coarse = _coarse_of_fine(parts, str(folder))
    return make_pool((x, heads[:, 1]), (test_x, test_heads[:, 1]), 100, str(folder), coarse=coarse)


def _coarse_of_fine(parts: list[Records], where: str) -> np.ndarray:
    """The superclass of each class, which every record must agree on."""
    coarse, fine = np.concatenate([heads for heads, _ in parts]).astype(np.int64).T
    if fine.max() >= 100 or coarse.max() >= 20:
        raise DataError(f"{where}: labels reach {coarse.max()} and {fine.max()}, expected below 20 and 100")
    table = np.zeros(100, dtype=np.int64)
    table[fine] = coarse
    if (table[fine] != coarse).any():
        raise DataError(f"{where}: a class appears under two superclasses; the file is damaged")
    return table


def fashion_mnist(root: Path | None) -> Pool:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28×28 in 10 classes (Xiao et al., 2017)."""
    return _idx_pool(fetch("fashion_mnist", root))


def mnist(root: Path | None) -> Pool:
    """MNIST: 60,000 + 10,000 handwritten digits of 28×28 (LeCun et al., 1998).

    With mnist_writers.npz beside the files the writers are known and partition `natural` can be used.
    """
    folder = fetch("mnist", root)
    writers = None
    if (folder / "mnist_writers.npz").exists():
        writers = _load_npz(folder / "mnist_writers.npz", ("writer_train",))["writer_train"]
    pool = _idx_pool(folder, writers)
    if writers is not None and len(writers) != len(pool.y):
        raise DataError(f"{folder / 'mnist_writers.npz'} names {len(writers)} writers, expected {len(pool.y)}")
    return pool


def _idx_pool(folder: Path, writers: np.ndarray | None = None) -> Pool:
    x, y, test_x, test_y = (read_idx(folder, name, 3 if "images" in name else 1) for name in IDX_FILES)
    return make_pool((x[:, None], y), (test_x[:, None], test_y), 10, str(folder), writers=writers)


def tiny_imagenet(root: Path | None) -> Pool:
    """Tiny-ImageNet: 100,000 + 10,000 colour images of 64×64 in 200 classes.

    The official validation set is the test set, since the official test set has no labels.
    """
    folder = fetch("tiny_imagenet", root)
    train, test, classes = read_tiny_imagenet(folder)
    return make_pool(train, test, classes, str(folder))


def npz(root: Path | None, path: str) -> Pool:
    """A NumPy file of your own with x_train, y_train, x_test, y_test.

    path: the file. uint8 images (N, C, H, W), (N, H, W, C) or (N, H, W) are normalised; other inputs pass
    unscaled.
    """
    file = _own(root, path)
    stored = _load_npz(file, ("x_train", "y_train", "x_test", "y_test"))
    for name in ("y_train", "y_test"):
        if stored[name].dtype.kind not in "iu" or stored[name].ndim != 1:
            raise DataError(
                f"{file}: {name} must be a vector of integers, not {stored[name].dtype} {stored[name].shape}"
            )
        largest = int(stored[name].max(initial=0))
        if largest >= max(CLASSES, len(stored[name])):
            raise DataError(f"{file}: {name} has a label {largest}; classes are numbered 0, 1, 2 …")
    classes = 1 + max(int(stored[name].max(initial=0)) for name in ("y_train", "y_test"))
    train, test = ((_channels_first(stored[f"x_{s}"]), stored[f"y_{s}"]) for s in ("train", "test"))
    return make_pool(train, test, classes, str(file))


def folder(root: Path | None, path: str, size: int = 32) -> Pool:
    """Image files of your own: path/train/CLASS/*.png|jpg and path/test/CLASS/*, classes in sorted order.

    path: the folder. size: images are resized to size×size.
    """
    if not 1 <= size <= SIDE:
        raise DataError(f"folder: size must be from 1 to {SIDE} pixels, not {size}")
    base = _own(root, path)
    if not (base / "train").is_dir():
        raise DataError(f"{base / 'train'} is missing; expected one folder per class in it")
    classes = sorted(entry.name for entry in (base / "train").iterdir() if entry.is_dir())
    train, test = (read_class_folders(base / split, classes, size) for split in ("train", "test"))
    return make_pool(train, test, len(classes), str(base))


def _own(root: Path | None, path: str) -> Path:
    """A path of the user's: as it stands, or under the data root."""
    given = user_path(path)
    return given if root is None or given.exists() else root / given


def _load_npz(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(_unpackable(path), allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored]
            if missing:
                raise DataError(f"{path} has no array {missing[0]!r}; it holds {', '.join(stored) or 'nothing'}")
            return {name: _usable(stored[name], f"{path}: {name}") for name in names}
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory: {error}") from None
    except (OSError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a readable .npz file: {error}") from None
    except (NotImplementedError, RuntimeError, SyntaxError, RecursionError, OverflowError) as error:
        raise DataError(f"{path} is not a readable .npz file: {error}") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} holds something other than plain arrays: {error}") from None


def _unpackable(path: Path) -> Path:
    """The path of a .npz file; refuse one that unpacks to more than memory can hold."""
    with zipfile.ZipFile(regular(path)) as packed:
        size, limit = sum(entry.file_size for entry in packed.infolist()), unpack_limit()
    if size > limit:
        raise DataError(f"{path} unpacks to {size >> 20} MB, more than half of this machine's memory")
    return path


def _usable(array: np.ndarray, where: str) -> np.ndarray:
    """The array in this machine's byte order; refuse what is no table of numbers."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or array.ndim == 0:
        raise DataError(f"{where} must be an array of numbers with an axis of samples, not {array.dtype} {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # PyTorch has few operations for these
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise DataError(f"{where} has numbers beyond {np.iinfo(np.int64).max}")
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _channels_first(x: np.ndarray) -> np.ndarray:
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.transpose(0, 3, 1, 2)
    return x


POOLS: dict[str, Callable[..., Pool]] = {
    maker.__name__: maker
    for maker in (digits, cifar10, cifar100, fashion_mnist, mnist, tiny_imagenet, imagenet200, npz, folder)
}
"""The data sets that partitions divide, by name."""
