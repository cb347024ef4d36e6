"""Readers of publishers' file formats. A damaged file is named, with what was expected and found."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import DataError

PIXELS = 3 * 32 * 32
BLOCK = 1 << 24  # bytes that are unpacked at a time

Records = tuple[np.ndarray, np.ndarray]  # label bytes (N, heads) and images (N, 3, 32, 32)


def regular(path: Path) -> Path:
    """The path; refuse what would block or never end when it is read: devices, sockets, named pipes."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file that data can be read from")
    return path


def unpack_limit() -> int:
    """How many bytes a packed file may have when it is unpacked: half of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 34


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    limit = unpack_limit()
    try:
        if path.suffix != ".gz":
            return regular(path).read_bytes()
        with gzip.open(regular(path)) as file:
            content = b"".join(takewhile(bool, (file.read(BLOCK) for _ in range(limit // BLOCK + 2))))
        if len(content) > limit:
            raise DataError(f"{path} unpacks to more than {limit >> 20} MB, half of this machine's memory")
        return content
    except MemoryError:
        raise DataError(f"{path} does not fit into memory ({path.stat().st_size >> 20} MB as it is stored)") from None
    except FileNotFoundError:
        raise DataError(f"{path} is missing; add it, or remove its folder and fetch the data set again") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, it may be truncated: {error}") from None


def read_cifar_records(path: Path, heads: int) -> Records:
    """CIFAR's binary version: records of `heads` label bytes and 3072 pixel bytes."""
    raw = np.frombuffer(read_bytes(path), dtype=np.uint8)
    record = heads + PIXELS
    if len(raw) == 0 or len(raw) % record:
        raise DataError(f"{path} has {len(raw)} bytes, expected a multiple of {record} (one record)")
    table = raw.reshape(-1, record)
    return table[:, :heads], table[:, heads:].reshape(-1, 3, 32, 32)


def read_cifar_pickle(path: Path, keys: Sequence[str]) -> Records:
    """CIFAR's python version: a pickled dictionary with the images under "data" and labels under `keys`."""
    stored = load_plain_pickle(path)
    if not isinstance(stored, dict):
        raise DataError(f"{path} holds a {type(stored).__name__}, expected a dictionary")
    table = {name.decode("latin1") if isinstance(name, bytes) else name: value for name, value in stored.items()}
    for name in ("data", *keys):
        if name not in table:
            raise DataError(f"{path} has no entry {name!r}")
    data: Any = table["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (PIXELS,):
        raise DataError(f"{path}: 'data' is not a uint8 array of rows of {PIXELS} pixels")
    labels = [_byte_labels(table[name], len(data), f"{path}: {name}") for name in keys]
    return np.stack(labels, axis=1), data.reshape(-1, 3, 32, 32)


def _byte_labels(values: Any, count: int, where: str) -> np.ndarray:
    try:
        labels = np.asarray(values)
        fine = labels.dtype.kind in "iu" and labels.ndim == 1 and (not count or 0 <= labels.min() <= labels.max() < 256)
    except (ValueError, TypeError, OverflowError):
        fine = False
    if not fine:
        raise DataError(f"{where} are no whole numbers from 0 to 255")
    if len(labels) != count:
        raise DataError(f"{where}: {len(labels)} of them for {count} images")
    return labels.astype(np.uint8)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Stands in for `_codecs.encode`, by which newer Pythons write bytes in old pickle formats."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not expected here")
    return text.encode("latin1")


# Asking an array how it would be pickled gives NumPy's constructor without importing a private module.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
}


class _PlainUnpickler(pickle.Unpickler):
    """Admits arrays and plain containers; whatever else a pickle names is refused unseen."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR's files do not contain")
        return _ADMITTED[module, name]


def load_plain_pickle(path: Path) -> Any:
    """Unpickle plain values, containers and NumPy arrays; refuse a file that names anything else."""
    try:
        with regular(path).open("rb") as file:
            return _PlainUnpickler(file, encoding="bytes").load()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; add it, or remove its folder and fetch the data set again") from None
    except DataError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(f"{path} was refused or is damaged: {error or type(error).__name__}") from None


def read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """An idx file of unsigned bytes with `dims` axes, as `name` or `name.gz` in the folder."""
    path = folder / name if (folder / name).exists() else folder / f"{name}.gz"
    raw = read_bytes(path)
    head = 4 * (1 + dims)
    if len(raw) < head:
        raise DataError(f"{path} has {len(raw)} bytes, expected a header of {head}")
    magic, *shape = struct.unpack(f">{1 + dims}I", raw[:head])
    if magic != 0x0800 + dims:
        raise DataError(f"{path} starts with {magic:#010x}, expected {0x0800 + dims:#010x} (idx, bytes, {dims} axes)")
    expected = head + math.prod(shape)
    if len(raw) != expected:
        raise DataError(f"{path} has {len(raw)} bytes unpacked, expected {expected} for its shape {tuple(shape)}")
    return np.frombuffer(raw, dtype=np.uint8, offset=head).reshape(shape)


def read_parts(paths: Sequence[Path], read: Callable[[Path], Records], official: Sequence[int]) -> list[Records]:
    """Read files that belong together.

    official: their published numbers of records. Once one file has its number all must, which finds a file
    cut between two records; sets that someone made smaller throughout are accepted.
    """
    parts = [read(path) for path in paths]
    if any(len(images) == count for (_, images), count in zip(parts, official, strict=True)):
        for path, (_, images), count in zip(paths, parts, official, strict=True):
            if len(images) != count:
                size = path.stat().st_size
                raise DataError(
                    f"{path} has {len(images)} records ({size} bytes), expected {count}"
                    f" ({size // len(images) * count} bytes); it may be truncated"
                )
    return parts
