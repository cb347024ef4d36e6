"""The published files of CIFAR-10-C and CIFAR-100-C, where a user has them.

`NAME.npy` holds uint8 (5·n, H, W, C): all n test images at severity 1, then at severity 2 …; `labels.npy` their labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedflat.analysis.corrupted import SEVERITIES
from fedflat.errors import InputError


class Published:
    """A folder of published corrupted images; only the rows that are asked for are read.

    Args:
        folder: The folder of the files.
        labels: Labels of the clean test images, in their order, which the files must repeat.

    Raises:
        InputError: The folder has no labels, or others.
    """

    def __init__(self, folder: str | Path, labels: Tensor) -> None:
        self.folder, self.count = Path(folder), len(labels)
        stored = self._load("labels")
        wanted = np.tile(labels.numpy(), len(SEVERITIES))
        if stored.shape != wanted.shape or not np.array_equal(stored, wanted):
            raise InputError(
                f"{self.folder / 'labels.npy'} has other labels than the {self.count} test images, once per severity: "
                "give the whole test set in its order, or another folder"
            )

    def __contains__(self, name: str) -> bool:
        return (self.folder / f"{name}.npy").exists()

    def images(self, name: str, severity: int, rows: Tensor, like: Tensor) -> Tensor:
        """Images (N, C, H, W) of one corruption for these rows of the test set, of the size of `like`."""
        stored = self._load(name)
        channels, height, width = like.shape[1:]
        shape = (self.count * len(SEVERITIES), height, width, channels)
        if stored.shape != shape or stored.dtype != np.uint8:
            raise InputError(
                f"{self.folder / name}.npy holds {stored.dtype} of shape {stored.shape}, but uint8 of shape {shape} is "
                "needed: fetch it again"
            )
        chosen = stored[rows.numpy() + (severity - 1) * self.count]
        return torch.from_numpy(np.ascontiguousarray(chosen.transpose(0, 3, 1, 2)))

    def _load(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            loaded: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read {path}: {error}; fetch it again") from None
        return loaded
