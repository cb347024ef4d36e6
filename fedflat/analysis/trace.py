"""Trace and diagonal of a symmetric operator from random signs (Hutchinson), with standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat import streams
from fedflat.analysis.hvp import Hessian, Product
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Options, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.errors import InputError
from fedflat.flat import FlatModel

LEAST = 10  # probes before the tolerance is looked at: two may agree by chance


@dataclass(frozen=True, eq=False)
class TraceEstimate:
    """tr H, its standard error (nan after one probe), and the same for every entry of the diagonal where asked for."""

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
    """The probe of this number: ±1 with equal chances, the same for every operator of this size."""
    bits = torch.randint(0, 2, (like.numel(),), generator=streams.torch_stream(seed, "probe", probe))
    return (2 * bits - 1).to(like.dtype)


def hutchinson(
    product: Product, like: Tensor, *, probes: int = 100, tol: float = 0.0, diagonal: bool = False, seed: int = 0
) -> TraceEstimate:
    """tr H ≈ mean of vᵀHv, diag H ≈ mean of v⊙Hv; both are exact after one probe where H is diagonal.

    tol: stop before `probes` when a probe changes the mean by less than this share of |trace|.
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
        if probe + 1 >= LEAST and abs(float(traces.mean - before)) < tol * abs(float(traces.mean)):
            break
    pair = (entries.mean, entries.error()) if diagonal else (None, None)
    return TraceEstimate(float(traces.mean), float(traces.error()), traces.count, *pair)


class Spread:
    """Mean and standard error of tensors that come one by one (Welford)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Take one more into account."""
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
    """Diagonal of the Hessian of the mean loss, with the trace. Its error shrinks with the root of the probes."""
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
