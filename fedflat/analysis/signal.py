"""Signal and noise in the gradients of single samples (paper 004)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedflat.analysis.data import take
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Options, Problem, Protocol, opened, suited
from fedflat.analysis.results import plain
from fedflat.errors import InputError
from fedflat.flat import FlatModel

log = logging.getLogger(__name__)
SILENT = 1e-20  # a parameter of less variance has no ratio
ALONE = 4  # a sample's gradient in a group takes about so many times its share of a batch's


@dataclass(frozen=True, eq=False)
class GradientSignal:
    """Mean ḡ and variance s² (n − 1) of every parameter's gradient over samples, and r = ḡ²/s².

    ratio: r, 0 where the variance is nothing; excluded: how many those are. total, average: of r, over the others.
    """

    total: float
    average: float
    excluded: int
    samples: int
    mean: Tensor = field(repr=False)
    variance: Tensor = field(repr=False)
    ratio: Tensor = field(repr=False)
    conditions: Conditions | None = None

    @property
    def osgr(self) -> float:
        """One-step generalisation ratio R = Σḡ²/(Σḡ² + Σs²/n): loss won on new data over that won on these.

        nan where there is no gradient at all.
        """
        signal, noise = float(self.mean.square().sum()), float(self.variance.sum()) / self.samples
        return signal / (signal + noise) if signal + noise else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self, "osgr")

    def plot(self) -> Any:
        """A matplotlib figure: how many parameters have which r."""
        from fedflat.analysis.plots import signal_figure

        return signal_figure(self)


def gsnr(
    model: nn.Module | FlatModel, data: Any, *, debias: bool = False, **options: Unpack[Options]
) -> GradientSignal:
    """Gradient signal-to-noise ratio of every parameter, from per-sample gradients in chunks.

    debias: subtract s²/n, the noise of the mean, from ḡ² (not below 0).
    """
    protocol = Protocol.of(options)
    if protocol.bn == "batch":
        raise InputError("a single sample has no batch statistics: use bn='running'")
    moments = Moments()
    with opened(model, data, protocol) as problem:
        each = ALONE * problem.seconds / problem.samples
        announce(protocol.progress, "gradient signal", problem.samples, each)
        with tracked(protocol.progress, "gradient signal", problem.samples) as step:
            for gradients in sample_gradients(problem):
                moments.add(gradients)
                for _ in gradients:
                    step()
        return signal_of(moments.mean, moments.variance(), moments.count, debias, problem.conditions())


def signal_of(
    mean: Tensor, variance: Tensor, samples: int, debias: bool = False, conditions: Conditions | None = None
) -> GradientSignal:
    """The signal of given moments of per-sample gradients."""
    square = mean.square()
    if debias:
        square = (square - variance / samples).clamp_min(0)
    loud = variance >= SILENT
    ratio = torch.where(loud, square / variance.clamp_min(SILENT), 0.0)
    count = int(loud.sum())
    total = float(ratio.sum())
    average = total / count if count else math.nan
    return GradientSignal(total, average, len(mean) - count, samples, mean, variance, ratio, conditions)


def signal_from_batches(gradients: Tensor, batch_size: int, debias: bool = False) -> GradientSignal:
    """The same from gradients of equal batches, one a row: s² ≈ batch_size · their variance."""
    if gradients.dim() != 2 or len(gradients) < 2 or batch_size < 1:
        raise InputError("a variance needs the gradients of two batches or more, one a row, and their size")
    rows = gradients.double()
    return signal_of(rows.mean(0), batch_size * rows.var(0), batch_size * len(rows), debias)


class Moments:
    """Mean and variance of rows that come in blocks (Welford, Chan), in double precision."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Take a block into account."""
        rows = rows.double()
        mean, count = rows.mean(0), self.count + len(rows)
        away = mean - self.mean
        squares = (rows - mean).square().sum(0)
        self._squares = self._squares + squares + away.square() * (self.count * len(rows) / count)
        self.mean = self.mean + away * (len(rows) / count)
        self.count = count

    def variance(self) -> Tensor:
        """With n − 1."""
        if self.count < 2:
            raise InputError("a variance needs two samples or more")
        return self._squares / (self.count - 1)


def sample_gradients(problem: Problem) -> Iterator[Tensor]:
    """Gradients of single samples, one a row, in blocks that fit the memory allowed."""
    flat = problem.flat
    each = problem.sample_bytes() + 4 * flat.size * flat.theta.element_size()
    size = max(1, int(problem.protocol.memory * 2**30 / 4 / each))
    for x, y in problem.batches:
        for start in range(0, len(y), size):
            part = slice(start, min(start + size, len(y)))
            yield _gradients(problem, suited(take(x, part), flat.theta), y[part])


def _gradients(problem: Problem, x: Any, y: Tensor) -> Tensor:
    parameters = {span.name: p.detach() for span, p in zip(problem.flat.spans, problem.parameters, strict=True)}

    def loss(weights: dict[str, Tensor], one: Any, label: Tensor) -> Tensor:
        output = functional_call(problem.flat.module, weights, (_alone(one),))
        return problem.value(output, label[None])

    try:
        rows = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        return torch.cat([rows[span.name].reshape(len(y), -1) for span in problem.flat.spans], 1)
    except RuntimeError as error:  # some operations do not know vmap
        log.debug("per-sample gradients one at a time: %s", error)
        each = [grad(loss)(parameters, take(x, i), y[i]) for i in range(len(y))]
        return torch.stack([torch.cat([one[span.name].reshape(-1) for span in problem.flat.spans]) for one in each])


def _alone(x: Any) -> Any:
    """One sample as a batch of one."""
    if isinstance(x, dict):
        return {key: _alone(value) for key, value in x.items()}
    return type(x)(map(_alone, x)) if isinstance(x, (list, tuple)) else x[None]
