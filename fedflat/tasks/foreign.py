"""Metrics of the package torchmetrics, whose states workers can add."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.curves import falls
from fedflat.errors import InputError


def from_torchmetrics(name: str, metric: Any) -> tuple[Any, Any, bool]:
    """Count, value and direction of a torchmetrics object; all its states must be tensors that are added."""
    unfit = [state for state, reduce in metric._reductions.items() if getattr(reduce, "__name__", "") != "dim_zero_sum"]
    if unfit:
        raise InputError(f"metric {name!r}: {type(metric).__name__} keeps {unfit[0]!r}, which workers cannot add")
    higher = getattr(metric, "higher_is_better", None)
    wrapped = _Wrapped(metric)
    return wrapped.count, wrapped.value, falls(name) if higher is None else not higher


class _Wrapped:
    def __init__(self, metric: Any) -> None:
        self.metric = copy.deepcopy(metric)
        self.shapes = {state: tensor.shape for state, tensor in self.metric.metric_state.items()}

    def count(self, output: Any, y: Tensor) -> Tensor:
        self.metric.reset()
        self.metric.update(output, y)
        return torch.cat([tensor.double().reshape(-1) for tensor in self.metric.metric_state.values()])

    def value(self, sums: np.ndarray) -> float | list[float | None] | None:
        pieces = torch.split(torch.from_numpy(sums), [shape.numel() for shape in self.shapes.values()])
        for (state, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            kind = self.metric._defaults[state].dtype
            setattr(self.metric, state, piece.reshape(shape).to(kind))
        self.metric._update_count = 1
        self.metric._computed = None
        found = self.metric.compute()
        return float(found) if found.numel() == 1 else [float(v) for v in found]
