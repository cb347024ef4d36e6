"""Backward passes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def backward(loss: Tensor) -> None:
    """`loss.backward()` for a loss that is one number, with fewer calls of Python: they take a fifth of a small step.

    What PyTorch does besides on the way to its engine serves devices, subclasses and debug logs.
    """
    if _ENGINE is None or type(loss) is not Tensor or not loss.is_cpu or loss.dim():
        loss.backward()  # type: ignore[no-untyped-call]
        return
    _ENGINE.run_backward((loss,), (_one(loss.dtype),), False, False, (), allow_unreachable=True, accumulate_grad=True)


@cache
def _one(dtype: torch.dtype) -> Tensor:
    """The gradient of a loss with respect to itself; nobody changes it, since this module holds it."""
    return torch.ones((), dtype=dtype)
