"""Gradient centralisation (Yong et al., 2020) as a part: one file, and it composes with all the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedflat import Local, Part


@dataclass(frozen=True)
class Centralise(Part):
    """Take the mean out of every output channel's gradient, which then leaves the channels' means alone.

    g_c ← g_c − strength · mean(g_c), g_c the gradient of the weights of channel c

    strength: share of the mean that is taken out; 0 is the method without it. Keeps nothing; sends 1 down, 1 up.
    """

    rank: ClassVar[int] = 20  # last of the corrections: it is the gradient they have made that has no mean
    formula: ClassVar[str] = "g_c ← g_c − strength · mean(g_c)"
    strength: float = 1.0

    def __post_init__(self) -> None:
        self.require(0 <= self.strength <= 1, f"strength must lie between 0 and 1, got {self.strength}")

    def correct_gradient(self, local: Local) -> None:
        """Centre the rows of all weights with two dimensions or more."""
        for span in local.model.spans:
            if len(span.shape) >= 2:
                rows = span.channels(local.grad)
                rows.sub_(rows.mean(1, keepdim=True), alpha=self.strength)
