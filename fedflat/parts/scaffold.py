"""SCAFFOLD (Karimireddy et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.method import Local, Part, Server
from fedflat.parts.drift import control, refreshed_control, step_weights


@dataclass(frozen=True)
class Scaffold(Part):
    """Correct every local gradient by the difference between the common and the client's own direction.

    option: how c_i is refreshed, 2 by the formula, 1 by c_i⁺ = ∇F_i(w), the gradient over all samples at the received
    model. momentum_corrected: with momentum, divide by the step weights instead of K_i, so that c_i⁺ is a mean of
    gradients again. Client keeps c_i (1), server c (1); sends 2 down, 2 up (1 up would do with option 2).
    Differs from the paper in nothing; published codes divide by an undecayed lr or a common K, this by the actual ones.
    """

    formula: ClassVar[str] = (
        "g ← g + c − c_i,  afterwards c_i⁺ = c_i − c − Δ_i / (K_i η_l)\n"
        "server: w ← w + η_g mean_S Δ_i,  c ← c + (1/N) Σ_S (c_i⁺ − c_i)"
    )
    uniform: ClassVar[bool] = True
    option: int = 2
    momentum_corrected: bool = False

    def __post_init__(self) -> None:
        self.require(self.option in (1, 2), f"option must be 1 or 2, got {self.option}")

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        """Send the common direction."""
        return {"c": control(server.state(self), server.theta)}

    def begin(self, local: Local) -> None:
        """The correction is the same all round."""
        own = control(local.state(self), local.theta)
        local.scratch(self)["correction"] = local.received(self)["c"] - own

    def correct(self, local: Local) -> None:
        """Add it."""
        local.grad.add_(local.scratch(self)["correction"])

    def end(self, local: Local) -> None:
        """Refresh the client's direction and send what changed."""
        state, common = local.state(self), local.received(self)["c"]
        own = control(state, local.theta)
        e = local.experiment
        weight = step_weights(local.steps, e.momentum, e.nesterov) if self.momentum_corrected else local.steps
        fresh = local.full_gradient(local.origin) if self.option == 1 else refreshed_control(local, own, common, weight)
        local.send(self, c=fresh - own)
        state["c"] = fresh

    def conclude(self, server: Server) -> None:
        """Keep the common direction the mean of all clients' ones."""
        state = server.state(self)
        state["c"] = control(state, server.theta) + server.total(self)["c"] / server.clients
