"""Hutchinson's estimates of the trace and the diagonal of a symmetric operator, with standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.hvp import Hessian, Product
from fedflat.analysis.problem import Conditions, Options, Protocol, opened
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.core import streams
from fedflat.core.devices import hosted, on
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError

LEAST = 10  # probes before the tolerance is checked: two may agree by chance


@dataclass(frozen=True, eq=False)
class TraceEstimate:
    """tr H and its standard error (nan after one probe); on request the same for every entry of the diagonal."""

    trace: float
    trace_error: float
    probes: int
    diagonal: Tensor | None = None
    diagonal_error: Tensor | None = None
    conditions: Conditions | None = None

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists only."""
        return plain(self)


def signs(like: Tensor, seed: int, probe: int) -> Tensor:
    """Probe number `probe`: entries ±1 with equal probability, the same for every operator of this size."""
    bits = streams.stream(seed, "probe", probe).integers(2, like.numel())
    return on((2 * bits - 1).to(like.dtype), like.device)


def hutchinson(
    product: Product, like: Tensor, *, probes: int = 100, tol: float = 0.0, diagonal: bool = False, seed: int = 0
) -> TraceEstimate:
    """tr H ≈ mean of vᵀHv, diag H ≈ mean of v⊙Hv; both are exact after one probe if H is diagonal.

    Args:
        product: v ↦ Hv.
        like: A vector with the size, type and device of v.
        probes: Largest number of random vectors v.
        tol: Stop early when a probe changes the mean by less than tol·|trace|.
        diagonal: Estimate the diagonal as well.
        seed: Seed of the random vectors.
    """
    if probes < 1:
        raise InputError(f"at least one probe is needed, got {probes}")
    traces, entries = Spread(), Spread()
    for probe in range(probes):
        vector = signs(like, seed, probe)
        image = product(vector) * vector
        before = traces.mean
        traces.add(image.sum(dtype=torch.float64))
        if diagonal:
            entries.add(image.double())
        if tol and probe + 1 >= LEAST and abs(float(traces.mean - before)) < tol * abs(float(traces.mean)):
            break
    pair = (hosted(entries.mean), hosted(entries.error())) if diagonal else (None, None)
    return TraceEstimate(float(traces.mean), float(traces.error()), traces.count, *pair)


class Spread:
    """Running mean and standard error of a sequence of tensors (Welford)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Add one tensor."""
        self.count += 1
        away = value - self.mean
        self.mean = self.mean + away / self.count
        self._squares = self._squares + away * (value - self.mean)

    def error(self) -> Tensor:
        """Standard error of the mean."""
        if self.count < 2:
            return torch.full_like(self.mean, math.nan)
        return (self._squares / (self.count - 1) / self.count).sqrt()


def hessian_trace(
    model: nn.Module | FlatModel, data: Any, *, probes: int = 100, tol: float = 1e-3, **options: Unpack[Options]
) -> TraceEstimate:
    """Trace of the Hessian of the mean loss; `hutchinson` and `Protocol` explain the options."""
    return _estimate(model, data, probes, tol, False, options)


def hessian_diagonal(
    model: nn.Module | FlatModel, data: Any, *, probes: int = 100, **options: Unpack[Options]
) -> TraceEstimate:
    """Diagonal and trace of the Hessian of the mean loss. The error falls with the square root of `probes`."""
    return _estimate(model, data, probes, 0.0, True, options)


def _estimate(model: Any, data: Any, probes: int, tol: float, diagonal: bool, options: Options) -> TraceEstimate:
    protocol = Protocol.of(options)
    with opened(model, data, protocol) as problem, Hessian(problem) as hessian:
        announce(protocol.progress, "trace", probes, hessian.seconds)
        with tracked(protocol.progress, "trace", probes) as hessian.step:
            found = hutchinson(
                hessian, problem.flat.theta, probes=probes, tol=tol, diagonal=diagonal, seed=protocol.seed
            )
        numbers = (found.trace, found.trace_error, found.probes, found.diagonal, found.diagonal_error)
        return TraceEstimate(*numbers, problem.conditions())
