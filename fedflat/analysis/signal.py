"""Signal and noise in per-sample gradients (FedCONST)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedflat.analysis.batches import take
from fedflat.analysis.drawing import BLUE, dress
from fedflat.analysis.problem import Conditions, Options, Problem, Protocol, opened, suited
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.core.devices import hosted
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError
from fedflat.extras import blank_figure

log = logging.getLogger(__name__)
NO_VARIANCE = 1e-20  # a parameter whose gradient varies less has no ratio
ALONE = 4  # a per-sample gradient takes about this many times as long as a batch's gradient divided by its size


@dataclass(frozen=True, eq=False)
class GradientSignal:
    """Mean ḡ and variance s² (with n − 1) of every parameter's gradient over the samples, and r = ḡ²/s².

    Attributes:
        total, average: Sum and mean of r over the parameters whose variance is not zero.
        excluded: Number of parameters without variance.
        mean, variance: ḡ and s² per parameter.
        ratio: r per parameter; 0 where there is no variance.
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
        """One-step generalisation ratio R = Σḡ²/(Σḡ² + Σs²/n); nan if all gradients are zero.

        It is the decrease of the loss on new data, divided by the decrease on these data, to first order.
        """
        signal, noise = float(self.mean.square().sum()), float(self.variance.sum()) / self.samples
        return signal / (signal + noise) if signal + noise else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self, "osgr")

    def plot(self) -> Any:
        """Histogram of r over the parameters, on logarithmic axes."""
        figure = blank_figure(5, 4)
        axes = figure.subplots()
        ratios = self.ratio[self.ratio > 0].log10().tolist()
        axes.hist(ratios, bins=50, color=BLUE, log=True)
        dress(axes, f"gradient signal, mean r {self.average:.3g}", "log10 r", "parameters")
        return figure


def gsnr(
    model: nn.Module | FlatModel, data: Any, *, debias: bool = False, **options: Unpack[Options]
) -> GradientSignal:
    """Gradient signal-to-noise ratio of every parameter, from per-sample gradients in chunks.

    Args:
        debias: Subtract s²/n, the variance of the mean, from ḡ² (at least 0 remains).
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
    """The signal from given moments of per-sample gradients."""
    square = mean.square()
    if debias:
        square = (square - variance / samples).clamp_min(0)
    varies = variance >= NO_VARIANCE
    ratio = torch.where(varies, square / variance.clamp_min(NO_VARIANCE), 0.0)
    count = int(varies.sum())
    total = float(ratio.sum())
    average = total / count if count else math.nan
    vectors = hosted(mean), hosted(variance), hosted(ratio)
    return GradientSignal(total, average, len(mean) - count, samples, *vectors, conditions)


def signal_from_batches(gradients: Tensor, batch_size: int, debias: bool = False) -> GradientSignal:
    """The signal from gradients of batches of equal size, one per row: s² ≈ batch_size · their variance."""
    if gradients.dim() != 2 or len(gradients) < 2 or batch_size < 1:
        raise InputError("a variance needs the gradients of two batches or more, one per row, and their size")
    rows = gradients.double()
    return signal_of(rows.mean(0), batch_size * rows.var(0), batch_size * len(rows), debias)


class Moments:
    """Running mean and variance of rows that arrive in blocks (Welford, Chan), in double precision."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Add a block of rows."""
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
    """Per-sample gradients, one per row, in blocks that fit into `memory`."""
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
    except RuntimeError as error:  # vmap does not support some operations
        log.debug("per-sample gradients one at a time: %s", error)
        each = [grad(loss)(parameters, take(x, i), y[i]) for i in range(len(y))]
        return torch.stack([torch.cat([one[span.name].reshape(-1) for span in problem.flat.spans]) for one in each])


def _alone(x: Any) -> Any:
    """One sample as a batch of one."""
    if isinstance(x, dict):
        return {key: _alone(value) for key, value in x.items()}
    return type(x)(map(_alone, x)) if isinstance(x, (list, tuple)) else x[None]
