"""Data in LEAF's JSON layout: `users`, and `user_data[user] = {"x": …, "y": …}`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.data.arrays import make_pool
from fedflat.data.federation import Federation
from fedflat.data.indices import Split
from fedflat.data.leaf_json import read_json
from fedflat.data.pooled import PooledClients
from fedflat.data.preprocess import Preprocess
from fedflat.data.sources import data_root
from fedflat.errors import DataError

CACHE = ".fedflat-{}.npz"
CLASSES = 62


def femnist(root: Path | None, drop_repeated: bool = False) -> Federation:
    """FEMNIST in LEAF's layout: one client per writer, 28×28 grey, 62 classes (Caldas et al., 2018).

    Read from femnist/data/{train,test}/*.json, and from unseen/*.json the images of writers that never train: they are
    the further test set "unseen". The first reading takes about 10 s; arrays are kept beside the files. drop_repeated:
    leave out test images that the same writer has in training, too, a defect of LEAF's own files.
    """
    folder = data_root(root) / "femnist" / "data"
    parts = {split: _images(folder, split) for split in ("train", "test", "unseen")}
    x, y, owner, names = parts["train"]
    test_x, test_y, test_owner, test_names = parts["test"]
    if not len(y) or not len(test_y):
        raise DataError(f"data set femnist is not here: {folder} needs train/*.json and test/*.json; see --data-root")
    place = {name: i for i, name in enumerate(names)}
    stray = [name for name in test_names if name not in place]
    if stray:
        raise DataError(f"{folder}: writer {stray[0]!r} has test images but no training images")
    moved = np.array([place[name] for name in test_names])[test_owner]
    if drop_repeated:
        seen = {(int(w), image.tobytes()) for w, image in zip(owner, x, strict=True)}
        keep = np.array([(int(w), image.tobytes()) not in seen for w, image in zip(moved, test_x, strict=True)])
        test_x, test_y, moved = test_x[keep], test_y[keep], moved[keep]
    pool = make_pool((x[:, None], y), (test_x[:, None], test_y), CLASSES, str(folder))
    sets = [Split.of(np.flatnonzero(who == i) for i in range(len(names))) for who in (owner, moved)]
    common: dict[str, Any] = {"test": (pool.test_x, pool.test_y)}
    if len(parts["unseen"][1]):
        common["unseen"] = (torch.from_numpy(parts["unseen"][0][:, None]), torch.from_numpy(parts["unseen"][1]).long())
    return Federation(
        PooledClients(pool.x, pool.y, sets[0]),
        common,
        PooledClients(pool.test_x, pool.test_y, sets[1]),
        classes=CLASSES,
        preprocess=Preprocess(),
        name="femnist",
        partition="natural",
    )


def _images(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Images as bytes (n, 28, 28), labels, and each image's writer as a position in the list of writers."""
    files = sorted((folder / split).glob("*.json"))
    cache = folder / CACHE.format(split)
    stamp = np.array([[file.stat().st_size, file.stat().st_mtime_ns] for file in files], dtype=np.int64).reshape(-1, 2)
    with contextlib.suppress(OSError, ValueError, KeyError), np.load(cache, allow_pickle=False) as kept:
        if np.array_equal(kept["stamp"], stamp):
            return kept["x"], kept["y"], kept["owner"], [str(name) for name in kept["names"]]
    users: dict[str, dict[str, Any]] = {}
    for file in files:
        users |= read_json(file)
    x = [np.asarray(held["x"], dtype=np.float64).reshape(-1, 28, 28) for held in users.values()]
    images = np.concatenate([np.rint(255 * part).astype(np.uint8) for part in x] or [np.empty((0, 28, 28), np.uint8)])
    y = np.concatenate([np.asarray(held["y"], dtype=np.int64) for held in users.values()] or [np.empty(0, np.int64)])
    owner, names = np.repeat(np.arange(len(x)), [len(part) for part in x]), list(users)
    with contextlib.suppress(OSError):  # a folder that may not be written to is parsed anew
        np.savez(cache, stamp=stamp, x=images, y=y, owner=owner, names=np.array(names))
    return images, y, owner, names
