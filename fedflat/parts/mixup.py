"""Mixup on the client (Zhang et al., 2018; used in FedAlign)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.devices import on
from fedflat.core.part import Part
from fedflat.core.rows import Number
from fedflat.core.views import Batch, Local, SetupView
from fedflat.parts.requirements import require_mixable, require_numbers

Targets = tuple[tuple[Number, Tensor], ...]


@dataclass(frozen=True)
class Mixup(Part):
    """Train on convex combinations of samples, with the same combination of their labels' losses.

    One λ and one π per minibatch, for both passes of sharpness-aware gradients.
    Keeps nothing; sends 1 down, 1 up; data never leave the client.

    Args:
        gamma: γ (0.1 in the FedAlign paper, 1 in the FedASAM paper); 0 or less means λ = 1, which is FedAvg.
    """

    formula: ClassVar[str] = (
        "x̃ = λ x + (1 − λ) x_π,  L = λ CE(z, y) + (1 − λ) CE(z, y_π)\nλ ~ Beta(γ, γ),  π a permutation of the batch"
    )
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = -1  # after cutout and cutmix, since it mixes finished samples
    gamma: float = 1.0

    def check(self, setup: SetupView) -> None:
        require_numbers(self.name, setup)
        require_mixable(self.name, setup)

    def batch(self, local: Local, batch: Batch) -> Batch:
        if self.gamma <= 0:
            return batch
        rng = local.numpy_stream(self.name)
        weight, drawn = float(rng.beta(self.gamma, self.gamma)), torch.from_numpy(rng.permutation(len(batch.x)))
        order = on(drawn, local.theta.device)
        return Batch(torch.lerp(batch.x[order], batch.x, weight), mixed(batch.targets, weight, order))


def mixed(targets: Targets, weight: float, order: Tensor) -> Targets:
    """Give every label `weight`, and the label that `order` puts in its place the rest."""
    return tuple((w * weight, y) for w, y in targets) + tuple((w * (1 - weight), y[order]) for w, y in targets)
