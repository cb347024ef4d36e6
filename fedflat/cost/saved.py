"""Measures the memory that forward passes keep for the gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Saved(saved_tensors_hooks):
    """Measures, inside a `with` block, the memory that autograd holds; a storage counts once.

    Args:
        but: A tensor whose memory does not count, such as the weights.

    Attributes:
        peak: The largest number of bytes held at the same time.
    """

    def __init__(self, but: Tensor) -> None:
        super().__init__(self._hold, lambda held: held.tensor)
        self.peak = self._now = 0
        self._holders = {_address(but): 1}

    def _hold(self, tensor: Tensor) -> _Held:
        address = _address(tensor)
        self._holders[address] = self._holders.get(address, 0) + 1
        if self._holders[address] == 1:
            self._now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)
        return _Held(self, tensor)

    def release(self, tensor: Tensor) -> None:
        """Count one holder less of this memory."""
        address = _address(tensor)
        self._holders[address] -= 1
        if self._holders[address] == 0:
            del self._holders[address]
            self._now -= tensor.untyped_storage().nbytes()


class _Held:
    """A tensor that autograd holds; it is released when this object is deleted."""

    def __init__(self, ledger: Saved, tensor: Tensor) -> None:
        self.ledger, self.tensor = ledger, tensor

    def __del__(self, *_: Any) -> None:
        self.ledger.release(self.tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
