"""Losses for clients with few of the classes: FedLC (Zhang et al., 2022) and FedDecorr (Shi et al., 2023)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local, SetupView
from fedflat.parts.requirements import of_one_class, require_classes, require_cross_entropy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedLC(Part):
    """Ask for larger margins of a client's rare classes, and leave the classes that it has not alone.

    n_c is the number of the client's training samples of class c. Classes with n_c = 0 have no probability and no
    gradient, so a client with one class only does not train. Evaluation uses the plain logits, and the recorded
    training loss is the plain one.
    Keeps nothing; sends 1 down, 1 up.
    Differs from the paper in its softmax over all classes, as in all public codes: without the true class the loss has
    no lower bound.

    Args:
        tau: τ; 0 is FedAvg. The limit τ → 0 is not: it leaves out absent classes.
        form: "margin" for the formula; "log" for z_c + τ log n_c, the balanced softmax.
    """

    sample_means: ClassVar[bool] = True
    formula: ClassVar[str] = "z_c ← z_c − τ n_c^(−1/4) in the cross-entropy,  −∞ where n_c = 0"
    tau: NonNegative = 1.0
    form: Literal["margin", "log"] = "margin"

    def check(self, setup: SetupView) -> None:
        require_classes(self.name, setup)
        require_cross_entropy(self.name, setup)
        single, seen = of_one_class(setup)
        if single and self.tau > 0:
            log.warning(
                "fedlc: of %d clients that were looked at, %d have samples of one class only. Their loss and its "
                "gradient are 0, and they do not train: take a partition with more classes per client, or no fedlc",
                *(seen, single),
            )

    def loss(self, local: Local, output: Any) -> Tensor | None:
        plain, scratch = local.data_loss, local.scratch(self)
        if self.tau == 0 or plain is None:
            return None
        if "shift" not in scratch:
            scratch["shift"] = self._shift(local.label_counts(output.shape[1]).to(local.theta))
        shifted = output + scratch["shift"].view(1, -1, *[1] * (output.dim() - 2))
        losses = [weight * F.cross_entropy(shifted, y) for weight, y in local.batch.targets]
        return torch.stack(losses).sum() - plain  # takes its place: the two plain losses cancel exactly

    def _shift(self, counts: Tensor) -> Tensor:
        shift = counts.log() if self.form == "log" else -(counts**-0.25)
        return torch.where(counts > 0, self.tau * shift, -torch.inf)


@dataclass(frozen=True)
class FedDecorr(Part):
    """Decorrelate the features of a batch, so that they do not collapse to few dimensions under skewed labels.

    f are the features, the head's input, B × d_f; maps and sequences are averaged over their positions. The variance is
    unbiased. A batch of one sample has no term. Features that are almost always zero can make gradients large: set
    `clip`.
    Keeps nothing; sends 1 down, 1 up.
    This is the authors' code, to whose scale all published β belong: it is (B − 1)²/B times the mean squared
    correlation between different features. The paper's term ‖K‖²/d_f² would need a β about 60 times as large.

    Args:
        beta: β, the weight of the term; 0 is FedAvg.
    """

    formula: ClassVar[str] = (
        "L ← L + β / (d_f (d_f − 1) B) Σ_{a≠b} M_ab²,  M = zᵀz,  z = (f − mean f) / √(var f + 1e-8)"
    )
    stacks: ClassVar[bool] = True
    beta: NonNegative = 0.1

    def check(self, setup: SetupView) -> None:
        with setup.model.capture_features(self.name):
            pass
        if setup.experiment.batch_size == 1 and self.beta > 0:
            log.warning("feddecorr: with batch_size=1 there are no correlations, and this is FedAvg")

    def around_forward(self, local: Local) -> AbstractContextManager[Any]:
        return local.model.capture_features(self.name)

    def loss(self, local: Local, output: Any) -> Tensor | None:
        f = local.features
        if self.beta == 0 or f is None or len(f) < 2:
            return None
        return self.beta * correlation_penalty(f.to(local.theta.dtype))


def correlation_penalty(f: Tensor) -> Tensor:
    """The term of FedDecorr for β = 1, of vectors B × d_f, sequences B × positions × d_f or maps B × d_f × H × W."""
    if f.dim() > 2:
        f = f.mean(1) if f.dim() == 3 else f.flatten(2).mean(2)
    batch, width = f.shape
    z = (f - f.mean(0)) / (f.var(0) + 1e-8).sqrt()
    products = (z.T @ z).fill_diagonal_(0)
    return products.square().sum() / (max(1, width * (width - 1)) * batch)
