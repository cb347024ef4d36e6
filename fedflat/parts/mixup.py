"""Mixup on the client (Zhang et al., 2018; paper 001)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.method import Batch, Local, Part
from fedflat.parts.inputs import require_mixable, require_numbers

if TYPE_CHECKING:
    from fedflat.task import Task

Targets = tuple[tuple[float, Tensor], ...]


@dataclass(frozen=True)
class Mixup(Part):
    """Train on convex combinations of samples, with the same combination of their labels' losses.

    gamma: γ (0.1 in paper 001, 1 in paper 003); 0 or less has λ = 1, which is FedAvg. One λ and one π a minibatch, the
    same in both passes of sharpness-aware gradients. Keeps nothing; sends 1 down, 1 up; data never leave the client.
    """

    formula: ClassVar[str] = (
        "x̃ = λ x + (1 − λ) x_π,  L = λ CE(z, y) + (1 − λ) CE(z, y_π)\nλ ~ Beta(γ, γ),  π a permutation of the batch"
    )
    rank: ClassVar[int] = -1  # mixes finished samples: after cutout and cutmix
    gamma: float = 1.0

    def check(self, task: Task) -> None:
        """Token ids and other integers cannot be mixed."""
        require_numbers(self.name, task)
        require_mixable(self.name, task)

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Mix the samples of the batch among each other."""
        if self.gamma <= 0:
            return batch
        rng = local.numpy_stream(self.name)
        weight, order = float(rng.beta(self.gamma, self.gamma)), torch.from_numpy(rng.permutation(len(batch.x)))
        return Batch(torch.lerp(batch.x[order], batch.x, weight), mixed(batch.targets, weight, order))


def mixed(targets: Targets, weight: float, order: Tensor) -> Targets:
    """Every label with `weight`, and with the rest of it the label that `order` puts in its place."""
    return tuple((w * weight, y) for w, y in targets) + tuple((w * (1 - weight), y[order]) for w, y in targets)
