"""Any object as a few bytes beside the memory of its tensors and arrays, which travels and is read without a copy."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor

Parcel = tuple[bytes, list[np.ndarray]]


def pack(value: Any) -> Parcel:
    """`value` as a parcel. Code of the user's own script goes along; tensors that share memory will do so again."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(parcel: Parcel, *, own: bool = False) -> Any:
    """The object in a parcel. own: with copies of its memory, which may be written to."""
    head, memory = parcel
    return pickle.loads(head, buffers=[_copy(part) for part in memory] if own else memory)


def weight(parcel: Parcel) -> int:
    """Its bytes."""
    head, memory = parcel
    return len(head) + sum(part.nbytes for part in memory)


class _Memory:
    """What one tensor or several are views of; pickled once."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, (pickle.PickleBuffer(self.content.data),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[tuple[int, int], _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """Take the memory of plain tensors out of the stream."""
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
        warnings.simplefilter("ignore")  # that it is read-only, which is known
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: Any, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Tensor:
    view = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    tensor: Tensor = view.requires_grad_(requires_grad)
    return tensor


def _copy(memory: np.ndarray) -> np.ndarray:
    """A copy where PyTorch would have put it: kernels may round otherwise at other alignments."""
    copy = torch.empty(memory.nbytes, dtype=torch.uint8).numpy()
    copy[:] = memory
    return copy
