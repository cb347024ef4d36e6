"""Serialise objects with the memory of tensors and arrays kept apart, so that it is sent and read without a copy."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor

Packed = tuple[bytes, list[np.ndarray]]


def pack(value: Any) -> Packed:
    """Serialise `value`, with code of the user's script; tensors that share memory still do after `unpack`."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(packed: Packed, *, own: bool = False) -> Any:
    """The object that was packed; with `own`, its tensors and arrays are copies that may be written to."""
    head, memory = packed
    return pickle.loads(head, buffers=[_copy(part) for part in memory] if own else memory)


def packed_bytes(packed: Packed) -> int:
    """The size in bytes."""
    head, memory = packed
    return len(head) + sum(part.nbytes for part in memory)


class _Memory:
    """Memory that one or several tensors are views of; pickled once."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, (pickle.PickleBuffer(self.content.data),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[tuple[int, int], _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """Keep the memory of plain tensors out of the stream."""
        if type(value) is not Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return super().reducer_override(value)
        view = value.dtype, value.storage_offset(), tuple(value.shape), value.stride(), value.requires_grad
        return _tensor, (self._shared(value.untyped_storage()), *view)

    def _shared(self, storage: torch.UntypedStorage) -> _Memory:
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._memory:
            self._memory[key] = _Memory(storage)
        return self._memory[key]


def _storage(buffer: Any) -> torch.UntypedStorage:
    if len(buffer) == 0:
        return torch.empty(0).untyped_storage()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only memory, which is intended
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: Any, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Tensor:
    view = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    tensor: Tensor = view.requires_grad_(requires_grad)
    return tensor


def _copy(memory: np.ndarray) -> np.ndarray:
    """A copy in memory from PyTorch: its alignment matters, since kernels may round differently at another one."""
    copy = torch.empty(memory.nbytes, dtype=torch.uint8).numpy()
    copy[:] = memory
    return copy
