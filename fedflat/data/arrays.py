"""A data set before it is divided: images, labels, and what else partitioners may go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import DataError


@dataclass(frozen=True)
class Targets:
    """What a partitioner sees of the training samples.

    labels: class of each sample, 0 … classes − 1. coarse: coarse label of each *class* (CIFAR-100's
    superclasses). writers: who wrote each sample (MNIST).
    """

    labels: np.ndarray
    classes: int
    coarse: np.ndarray | None = None
    writers: np.ndarray | None = None

    def by_class(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Positions of every class's samples, shuffled."""
        order = rng.permutation(len(self.labels))
        order = order[np.argsort(self.labels[order], kind="stable")]
        return np.split(order, np.cumsum(np.bincount(self.labels, minlength=self.classes))[:-1])


class LazySamples(Protocol):
    """Samples that are read when they are asked for, and of which some can be chosen without reading any."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Raw inputs and targets at these positions."""
        ...

    def __getitem__(self, indices: Tensor) -> LazySamples:
        """The samples at these positions."""
        ...


@dataclass(frozen=True)
class Pool:
    """Training and test samples of a data set, and what a partitioner sees of the former.

    x, test_x: uint8 images (N, C, H, W) kept channels-last in memory, or whatever a user's file holds; or samples that
    are read when they are asked for.
    """

    x: Tensor | LazySamples
    y: Tensor
    test_x: Tensor | LazySamples
    test_y: Tensor
    targets: Targets

    @property
    def lazy(self) -> bool:
        """Whether samples are read when they are asked for."""
        return not isinstance(self.x, Tensor)

    @property
    def test(self) -> LazySamples | tuple[Tensor, Tensor]:
        """The test set."""
        return (self.test_x, self.test_y) if isinstance(self.test_x, Tensor) else self.test_x


def make_pool(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: int,
    where: str,
    coarse: np.ndarray | None = None,
    writers: np.ndarray | None = None,
) -> Pool:
    """Check that inputs and labels fit together and turn them into tensors.

    where: the file or folder to name in an error.
    """
    for split, (x, y) in (("training", train), ("test", test)):
        if len(x) != len(y):
            raise DataError(f"{where}: {len(x)} {split} inputs but {len(y)} labels")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise DataError(f"{where}: {split} labels reach from {y.min()} to {y.max()}, expected 0 … {classes - 1}")
    labels = train[1].astype(np.int64)
    tensors = (
        _inputs(train[0]),
        torch.from_numpy(labels),
        _inputs(test[0]),
        torch.from_numpy(test[1].astype(np.int64)),
    )
    return Pool(*tensors, Targets(labels, classes, coarse, writers))


def _inputs(x: np.ndarray) -> Tensor:
    """A tensor of the inputs; images are laid out channels-last, as convolutions on a CPU want them."""
    if x.ndim != 4:
        return torch.from_numpy(np.array(x))
    rows = np.empty((len(x), *x.shape[2:], x.shape[1]), dtype=x.dtype)
    rows[:] = x.transpose(0, 2, 3, 1)
    return torch.from_numpy(rows).permute(0, 3, 1, 2)
