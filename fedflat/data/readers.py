"""Readers of publishers' file formats. A damaged file is named, with what was expected and found."""

from __future__ import annotations

import gzip
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import DataError

PIXELS = 3 * 32 * 32

Records = tuple[np.ndarray, np.ndarray]  # label bytes (N, heads) and images (N, 3, 32, 32)


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
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
    table = {name.decode() if isinstance(name, bytes) else name: value for name, value in stored.items()}
    for name in ("data", *keys):
        if name not in table:
            raise DataError(f"{path} has no entry {name!r}")
    data = table["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (PIXELS,):
        raise DataError(f"{path}: 'data' is not a uint8 array of rows of {PIXELS} pixels")
    for name in keys:
        if len(table[name]) != len(data):
            raise DataError(f"{path}: {len(data)} images but {len(table[name])} {name}")
    return np.stack([np.asarray(table[name], dtype=np.uint8) for name in keys], axis=1), data.reshape(-1, 3, 32, 32)


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
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="bytes").load()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; add it, or remove its folder and fetch the data set again") from None
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
    expected = head + int(np.prod(shape, dtype=np.int64))
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
