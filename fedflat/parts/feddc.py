"""FedDC (Gao et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.method import Local, Part, Server
from fedflat.parts.drift import add_pull, begin_pull, control, refreshed_control, remember_drift, step_with_drift


@dataclass(frozen=True)
class FedDC(Part):
    """Decouple the local drift from the model and correct it: FedDyn's pull and SCAFFOLD's correction together.

    alpha: α, with α_i = α/ω_i. Client keeps H_i, c_i (2), server H̄, c (2); sends 2 down, 2 up.
    Differs from the paper, as its code does, in the states (SCAFFOLD's option 2) and in taking two separate means.
    """

    formula: ClassVar[str] = (
        "g ← g + α_i (w_k − w + H_i) + c/ω_i − c_i,  α_i = α/ω_i\n"
        "afterwards H_i ← H_i + Δ_i,  c_i⁺ = c_i − c/ω_i − Δ_i / (K_i η_l)\n"
        "server: c ← c + (1/N) Σ_S ω_i (c_i⁺ − c_i),  w ← mean_S y_i + mean_all H_i"
    )
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    own_step: ClassVar[str] = "the mean of the local models plus the mean drift"
    alpha: float = 0.01

    def __post_init__(self) -> None:
        self.require(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        """Send the common direction."""
        return {"c": control(server.state(self), server.theta)}

    def begin(self, local: Local) -> None:
        """Set the strength of the pull and the correction of the round."""
        begin_pull(local, self, self.alpha, clip_split=False)
        scratch = local.scratch(self)
        scratch["common"] = local.received(self)["c"] / local.share
        scratch["correction"] = scratch["common"] - control(local.state(self), local.theta)

    def correct(self, local: Local) -> None:
        """Add both."""
        add_pull(local, self, clip_split=False)
        local.grad.add_(local.scratch(self)["correction"])

    def end(self, local: Local) -> None:
        """Refresh drift and direction, send what changed in the direction."""
        remember_drift(local, self)
        state = local.state(self)
        own = control(state, local.theta)
        fresh = refreshed_control(local, own, local.scratch(self)["common"], local.steps)
        local.send(self, c=(fresh - own) * local.share)
        state["c"] = fresh

    def step(self, server: Server, delta: Tensor) -> None:
        """Mean plus drift."""
        step_with_drift(server, self, delta)

    def conclude(self, server: Server) -> None:
        """Refresh the common direction."""
        state = server.state(self)
        state["c"] = control(state, server.theta) + server.total(self)["c"] / server.clients
