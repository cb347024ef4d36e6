"""Stochastic depth (Huang et al., 2016; paper 001)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedflat.errors import InputError
from fedflat.method import Batch, Local, Part
from fedflat.models.layers import ResidualBlock


@dataclass(frozen=True)
class StochDepth(Part):
    """Train a random part of a residual network's blocks at every step, and all of them together in evaluation.

    keep: ρ_L, of the last block; 1 is FedAvg. rule: "paper" for ρ_ℓ, or "code", FedAlign's, with (ℓ−1)/(L−1), which
    never drops the first block. One draw a block and minibatch, the same in both passes of sharpness-aware gradients
    and in the passes of fedalign and gradaug. A dropped branch is not evaluated and its BatchNorm does not move.
    The model that a run returns has the factors ρ_ℓ built in; its weights have the names they have without this part,
    so load them into such a model. Put into training mode by hand, it draws from PyTorch's global generator.
    Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = (
        "training: relu(b_ℓ f_ℓ(x) + shortcut(x)),  b_ℓ ~ Bernoulli(ρ_ℓ)\n"
        "evaluation: relu(ρ_ℓ f_ℓ(x) + shortcut(x)),  ρ_ℓ = 1 − (ℓ/L)(1 − ρ_L),  ℓ = 1 … L"
    )
    rank: ClassVar[int] = -10  # a round must not begin with another's draws
    keep: float = 0.9
    rule: str = "paper"

    def __post_init__(self) -> None:
        self.require(0 <= self.keep <= 1, f"keep must lie between 0 and 1, got {self.keep}")
        self.require(self.rule in ("paper", "code"), f"rule is 'paper' or 'code', not {self.rule!r}")

    def build(self, module: nn.Module) -> nn.Module:
        """Give every block its ρ_ℓ."""
        blocks = blocks_of(module)
        if not blocks:
            raise InputError(
                f"{self.name} drops residual blocks, but the network has none that it knows: "
                "build them of fedflat.models.ResidualBlock"
            )
        for number, block in enumerate(blocks, start=1):
            block.survival = self.survival(number, len(blocks))
        return module

    def survival(self, number: int, blocks: int) -> float:
        """ρ_ℓ of block ℓ = `number` of so many."""
        depth = number / blocks if self.rule == "paper" else (number - 1) / max(1, blocks - 1)
        return 1 - depth * (1 - self.keep)

    def begin(self, local: Local) -> None:
        """Find the blocks, and forget another client's draws."""
        local.scratch(self)["blocks"] = blocks_of(local.model.module)
        self.end(local)

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Draw the blocks that this minibatch goes without."""
        blocks = local.scratch(self)["blocks"]
        for block, number in zip(blocks, local.numpy_stream(self.name).random(len(blocks)), strict=True):
            block.dropped = bool(number >= block.survival)
        return batch

    def end(self, local: Local) -> None:
        """Forget the draws."""
        for block in local.scratch(self)["blocks"]:
            block.dropped = None


def blocks_of(module: nn.Module) -> list[ResidualBlock]:
    """The residual blocks, first to last."""
    return [block for block in module.modules() if isinstance(block, ResidualBlock)]
