"""FedDyn (Acar et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fedflat.method import Local, Part, Server
from fedflat.parts.drift import add_pull, begin_pull, check_split, remember_drift, step_with_drift

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class FedDyn(Part):
    """Regularise each client so that its stationary points become those of the global loss.

    alpha: α; 0 is *not* FedAvg, since the server still extrapolates by H̄. clip_split: published code's clipping.
    Client keeps H_i (1), server H̄ (1); sends 1 down, 1 up. The paper's ĝ_i is −α_i H_i, its h is −α H̄.
    Differs from the paper in dividing α by the relative size ω_i of a client, as its code does.
    """

    formula: ClassVar[str] = (
        "g ← g + α_i (w_k − w + H_i),  afterwards H_i ← H_i + Δ_i,  α_i = α/ω_i\n"
        "server: H̄ ← H̄ + (1/N) Σ_S Δ_i,  w ← mean_S y_i + H̄"
    )
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    own_step: ClassVar[str] = "the mean of the local models plus the mean drift"
    alpha: float = 0.01
    clip_split: bool = False

    def __post_init__(self) -> None:
        self.require(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")

    def check(self, task: Task) -> None:
        """Refuse published code's clipping where it would do something else."""
        check_split(task, self, self.clip_split)

    def begin(self, local: Local) -> None:
        """Set the strength of the pull."""
        begin_pull(local, self, self.alpha, self.clip_split)

    def correct(self, local: Local) -> None:
        """Add the pull."""
        add_pull(local, self, self.clip_split)

    def end(self, local: Local) -> None:
        """Add this round's update to the client's drift."""
        remember_drift(local, self)

    def step(self, server: Server, delta: Tensor) -> None:
        """Mean plus drift."""
        step_with_drift(server, self, delta)
