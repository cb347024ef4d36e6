"""Named tensors in memory that two processes share: written with one copy, read with none."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
Letter = tuple[int, list[Entry]]
"""What to send through a pipe so that the other side can read a mailbox: its size and its table of contents."""

ALIGNMENT = 64


class Mailbox:
    """A growing piece of shared memory. Make it before forking; afterwards both sides read and write it in turns."""

    def __init__(self) -> None:
        self._file = _open_shared()
        self._map: mmap.mmap | None = None
        self._size = 0

    def write(self, tensors: Mapping[str, Tensor]) -> Letter:
        """Copy `tensors` in, replacing what was there; they must not be views of this same box."""
        entries: list[Entry] = []
        position = 0
        for name, tensor in tensors.items():
            entries.append((name, tensor.dtype, tuple(tensor.shape), position))
            position += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._reach(max(position, ALIGNMENT))
        for name, target in self.read((self._size, entries)).items():
            target.copy_(tensors[name].detach())
        return self._size, entries

    def read(self, letter: Letter) -> dict[str, Tensor]:
        """The tensors of a letter, as views that change when the box is written to again."""
        size, entries = letter
        self._reach(size)
        return {name: self._view(dtype, shape, position) for name, dtype, shape, position in entries}

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], position: int) -> Tensor:
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=position).view(shape)

    def _reach(self, size: int) -> None:
        if size <= self._size:
            return
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._map, self._size = mmap.mmap(self._file, size), size

    def close(self) -> None:
        """Give the descriptor back; views that are still around keep their memory."""
        os.close(self._file)


def _open_shared() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedflat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
