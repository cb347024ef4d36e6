"""Named tensors in memory that processes share: writing copies once, reading never."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor

Entry = tuple[str, str, tuple[int, ...], int]
Contents = tuple[int, list[Entry]]
"""What another process needs to read a `SharedTensors`: its size, and name, type, shape and position of every tensor.

Types are names, such as "float32": a pickled `torch.dtype` takes several times as long to write and to read.
"""

ALIGNMENT = 64


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that processes forked from now on share."""
    count = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(count, 1) * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class SharedTensors:
    """Shared memory that grows. Create it before forking; afterwards both processes read and write it in turns."""

    def __init__(self) -> None:
        self._file = _open_shared()
        self._map: mmap.mmap | None = None
        self._size = 0

    def write(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Copy `tensors` in, replacing what was there; they must not be views of this same memory."""
        if not tensors:
            return self._size, []
        entries: list[Entry] = []
        position = 0
        for name, tensor in tensors.items():
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), position))
            position += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._reach(max(position, ALIGNMENT))
        for entry, tensor in zip(entries, tensors.values(), strict=True):
            self._view(*entry[1:]).copy_(tensor.detach())
        return self._size, entries

    def read(self, contents: Contents) -> dict[str, Tensor]:
        """The tensors, as views that change when the memory is written to again."""
        size, entries = contents
        self._reach(size)
        return {name: self._view(kind, shape, position) for name, kind, shape, position in entries}

    def _view(self, kind: str, shape: tuple[int, ...], position: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, kind)
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
        """Close the file descriptor; existing views keep their memory."""
        os.close(self._file)


def _open_shared() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedflat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
