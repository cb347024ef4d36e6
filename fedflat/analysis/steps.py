"""How much one gradient step lowers the loss, and how much the gradient depends on the batch (FedCONST)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.problem import Options, Problem, Protocol, add_parts, opened
from fedflat.analysis.results import plain
from fedflat.core.devices import hosted
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError


@dataclass(frozen=True)
class StepRatio:
    """Decrease of the held-out loss divided by that of the training loss, for one gradient step.

    Attributes:
        measured: The ratio for a step that was taken.
        first_order: The ratio to first order in the learning rate.
    """

    measured: float
    first_order: float

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self)


def osgr(
    model: nn.Module | FlatModel, data: Any, held_out: Any, *, lr: float = 0.01, **options: Unpack[Options]
) -> StepRatio:
    """One-step generalisation ratio of one gradient step of size `lr` on `data`, evaluated on `data` and `held_out`."""
    protocol = Protocol.of(options)
    with opened(model, data, protocol) as train, opened(model, held_out, protocol) as test:
        first = float(train.gradient.double() @ test.gradient.double() / train.gradient.double().square().sum())
        drops = []
        for problem in (test, train):
            problem.flat.theta.sub_(train.gradient, alpha=lr)
            drops.append(problem.loss - problem.evaluate()[0])
        return StepRatio(drops[0] / drops[1] if drops[1] else math.nan, first)


@dataclass(frozen=True)
class GradientVariance:
    """Mean of ‖g_m − ḡ‖² over minibatch gradients g_m at fixed weights; `relative` is divided by ‖ḡ‖²."""

    variance: float
    relative: float
    batches: int

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self)


def gradient_variance(model: nn.Module | FlatModel, data: Any, **options: Unpack[Options]) -> GradientVariance:
    """Variance of the gradients of minibatches, of 50 samples unless `batch_size` is given.

    The paper plots a gradient variance without a definition; this one is ours.
    """
    options.setdefault("batch_size", 50)
    with opened(model, data, Protocol.of(options)) as problem:
        return variance_of(torch.stack([_gradient(problem, index) for index in range(len(problem.batches))]))


def variance_of(gradients: Tensor) -> GradientVariance:
    """Variance of given gradients, one per row."""
    if len(gradients) < 2:
        raise InputError("a variance needs two minibatches or more: give more samples or a smaller batch_size")
    rows = gradients.double()
    mean = rows.mean(0)
    variance = float((rows - mean).square().sum(1).mean())
    norm = float(mean.square().sum())
    return GradientVariance(variance, variance / norm if norm else math.nan, len(rows))


def _gradient(problem: Problem, index: int) -> Tensor:
    gradient = torch.zeros_like(problem.flat.theta)
    add_parts(gradient, problem.flat.spans, problem.batch_gradient(index)[1], 1.0)
    return gradient


@dataclass(frozen=True)
class Movement:
    """Mean |w| and mean r among the parameters that moved most and least (FedCONST paper, fig. 5)."""

    most_weight: float
    most_ratio: float
    least_weight: float
    least_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return plain(self)


def by_movement(weights: Tensor, moved: Tensor, ratio: Tensor, share: float = 0.1) -> Movement:
    """Compare the parameters that moved most with those that moved least.

    Args:
        weights: w, one entry per parameter.
        moved: Δw.
        ratio: r of `gsnr`.
        share: Fraction of the parameters in each of the two groups.
    """
    weights, moved, ratio = hosted(weights), hosted(moved), hosted(ratio)
    if not 0 < share <= 0.5:
        raise InputError(f"share must be above 0 and at most 0.5, got {share}")
    if not weights.shape == moved.shape == ratio.shape or moved.dim() != 1 or not len(moved):
        raise InputError("weights, moved and ratio must be vectors of one length")
    count = max(1, int(share * len(moved)))
    order = moved.abs().argsort(stable=True)
    least, most = order[:count], order[-count:]
    means = (float(values[place].double().mean()) for place in (most, least) for values in (weights.abs(), ratio))
    return Movement(*means)
