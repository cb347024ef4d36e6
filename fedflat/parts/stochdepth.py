"""Stochastic depth (Huang et al., 2016; used in FedAlign)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fedflat.core.fields import Fraction
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local
from fedflat.errors import InputError
from fedflat.models.layers import ResidualBlock


@dataclass(frozen=True)
class StochDepth(Part):
    """Train a random subset of a residual network's blocks in every step, and evaluate all of them together.

    The blocks are drawn once per minibatch, for both passes of sharpness-aware gradients and for the passes of fedalign
    and gradaug. A dropped branch is not evaluated and its BatchNorm statistics do not change.
    The model that a run returns has the factors ρ_ℓ built in. Its weights have the same names as without this part, so
    load them only into a model that was built with it. In training mode outside of a run, it draws from PyTorch's
    global generator. Keeps nothing; sends 1 down, 1 up.

    Args:
        keep: ρ_L, the probability that the last block is kept; 1 is FedAvg.
        rule: "paper" for the formula's ρ_ℓ, or "code", FedAlign's, with (ℓ−1)/(L−1), which keeps the first block.
    """

    formula: ClassVar[str] = (
        "training: relu(b_ℓ f_ℓ(x) + shortcut(x)),  b_ℓ ~ Bernoulli(ρ_ℓ)\n"
        "evaluation: relu(ρ_ℓ f_ℓ(x) + shortcut(x)),  ρ_ℓ = 1 − (ℓ/L)(1 − ρ_L),  ℓ = 1 … L"
    )
    rank: ClassVar[int] = -10  # first, so that no part sees another client's draws
    keep: Fraction = 0.9
    rule: Literal["paper", "code"] = "paper"

    def build(self, module: nn.Module) -> nn.Module:
        blocks = blocks_of(module)
        if not blocks:
            raise InputError(
                f"{self.name} drops residual blocks, but the network has none that it knows: "
                "build them from fedflat.models.ResidualBlock"
            )
        for number, block in enumerate(blocks, start=1):
            block.survival = self.survival(number, len(blocks))
        return module

    def survival(self, number: int, blocks: int) -> float:
        """ρ_ℓ of block ℓ = `number` of `blocks`."""
        depth = number / blocks if self.rule == "paper" else (number - 1) / max(1, blocks - 1)
        return 1 - depth * (1 - self.keep)

    def begin(self, local: Local) -> None:
        local.scratch(self)["blocks"] = blocks_of(local.model.module)
        self.end(local)  # forgets another client's draws

    def batch(self, local: Local, batch: Batch) -> Batch:
        blocks = local.scratch(self)["blocks"]
        for block, number in zip(blocks, local.numpy_stream(self.name).random(len(blocks)), strict=True):
            block.dropped = bool(number >= block.survival)
        return batch

    def end(self, local: Local) -> None:
        for block in local.scratch(self)["blocks"]:
            block.dropped = None


def blocks_of(module: nn.Module) -> list[ResidualBlock]:
    """The residual blocks, first to last."""
    return [block for block in module.modules() if isinstance(block, ResidualBlock)]
