"""Small files in the publishers' formats, and the real data sets where they can be had."""

from __future__ import annotations

import fcntl
import gzip
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

PREPARE = Path(__file__).resolve().parents[2] / "shared" / "data" / "prepare.py"
SLOW = {"mnist"}


def real_root(name: str) -> Path:
    """A data root with the real data set `name`, or a skip that says why there is none.

    Taken from $FEDFLAT_DATA, or prepared once for all clones on this machine (some ten seconds a set).
    """
    from fedflat.data import locate

    return _root(name, lambda root: locate(name, root) is not None)


def laid_out(name: str, folder: str) -> Path:
    """A data root that has a folder which the preparing script makes for `name`, or a skip that says why not."""
    return _root(name, lambda root: (root / folder).is_dir())


def _root(name: str, there: Callable[[Path], bool]) -> Path:
    if os.environ.get("FEDFLAT_DATA") and there(Path(os.environ["FEDFLAT_DATA"])):
        return Path(os.environ["FEDFLAT_DATA"])
    root = Path(tempfile.gettempdir()) / f"fedflat-test-data-{os.getuid()}"
    root.mkdir(exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:  # test processes may run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not there(root):
            _prepare(name, root)
    return root


def _prepare(name: str, root: Path) -> None:
    if not PREPARE.exists():
        pytest.skip(f"no real {name}: $FEDFLAT_DATA does not hold it and the preparing script is not here")
    if name in SLOW:
        pytest.skip(f"no real {name}: preparing it takes too long for a test; set $FEDFLAT_DATA to where it lies")
    with tempfile.TemporaryDirectory(dir=root) as staging:  # so that a killed test leaves no half of a set
        command = [sys.executable, str(PREPARE), "--root", staging, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"no real {name}: {done.stderr.strip()[-200:]}")
        for folder in Path(staging).iterdir():
            folder.rename(root / folder.name)


def cifar_images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def write_cifar10_binary(root: Path, count: int = 20) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        labels = np.arange(count, dtype=np.uint8)[:, None] % 10
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, cifar_images(count, k)], axis=1).tobytes())
    return folder


def write_cifar10_python(root: Path, count: int = 20, text_keys: bool = False) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        table = {b"data": cifar_images(count, k), b"labels": [i % 10 for i in range(count)], b"batch_label": b"x"}
        stored = {key.decode(): value for key, value in table.items()} if text_keys else table
        (folder / name).write_bytes(pickle.dumps(stored, protocol=2))
    return folder


def write_cifar100(root: Path, python: bool, count: int = 200) -> Path:
    folder = root / ("cifar-100-python" if python else "cifar-100-binary")
    folder.mkdir(parents=True)
    for k, name in enumerate(("train", "test")):
        fine = np.arange(count, dtype=np.uint8) % 100
        coarse, images = fine // 5, cifar_images(count, k)
        if python:
            table = {b"data": images, b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            (folder / name).write_bytes(pickle.dumps(table, protocol=2))
        else:
            records = np.concatenate([coarse[:, None], fine[:, None], images], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(root: Path, packed: bool = True, folder: str = "mnist", writers: bool = False) -> Path:
    out = root / folder
    out.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for split, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            name, blob = f"{split}-{kind}-ubyte", idx_bytes(array)
            if packed:
                (out / f"{name}.gz").write_bytes(gzip.compress(blob))
            else:
                (out / name).write_bytes(blob)
    if writers:
        # Writer w has written w + 1 things at least: sizes 5, 10, 15, 30.
        np.savez(out / "mnist_writers.npz", writer_train=np.repeat([7, 3, 9, 4], [5, 10, 15, 30]).astype(np.int16))
    return out


def over_dispersion(counts: np.ndarray) -> float:
    """Total concentration of a Dirichlet-multinomial that is as spread as these counts (clients, classes)."""
    size, p = counts.sum(axis=1).mean(), 1 / counts.shape[1]
    f = ((counts - size * p) ** 2).mean() / (size * p * (1 - p))
    return float((size - f) / (f - 1))
