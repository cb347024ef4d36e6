"""SCAFFOLD (Karimireddy et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedflat.core.part import Part
from fedflat.core.rows import each
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import CONTROL, control, refreshed_control, step_weights, warn_of_momentum
from fedflat.parts.requirements import require_sgd


@dataclass(frozen=True)
class Scaffold(Part):
    """Correct every local gradient by the difference between the common and the client's own direction.

    The client keeps c_i (1), the server c (1); sends 2 down, 2 up (1 up would do with option 2).
    Differs from the paper in nothing; published codes divide by an undecayed lr or a common K, this by the actual ones.

    Args:
        option: 2 refreshes c_i by the formula, 1 by c_i⁺ = ∇F_i(w), the gradient over all samples of the client.
        momentum_corrected: With momentum, divide by the step weights, not by K_i, so that c_i⁺ is a mean of gradients.
    """

    formula: ClassVar[str] = (
        "g ← g + c − c_i,  afterwards c_i⁺ = c_i − c − Δ_i / (K_i η_l)\n"
        "server: w ← w + η_g mean_S Δ_i,  c ← c + (1/N) Σ_S (c_i⁺ − c_i)"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (CONTROL,)
    option: Literal[1, 2] = 2
    momentum_corrected: bool = False

    def check(self, setup: SetupView) -> None:
        if self.option == 2:
            require_sgd(f"{self.name} with option=2", setup, "the control variate c_i")
            if not self.momentum_corrected:
                warn_of_momentum(setup, self, "momentum_corrected=True")

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"c": control(server.state(self), server.theta)}

    def begin(self, local: Local) -> None:
        own = control(local.state(self), local.theta)
        local.scratch(self)["correction"] = local.received(self)["c"] - own

    def correct_gradient(self, local: Local) -> None:
        local.grad.add_(local.scratch(self)["correction"])

    def end(self, local: Local) -> None:
        state, common = local.state(self), local.received(self)["c"]
        own = control(state, local.theta)
        e = local.experiment
        weight = local.weighted_steps
        if self.momentum_corrected:
            weight = each(lambda steps: step_weights(int(steps), e.momentum, e.nesterov), local.steps) * local.mean_rate
        fresh = local.full_gradient(local.given) if self.option == 1 else refreshed_control(local, own, common, weight)
        local.send(self, c=fresh - own)
        state["c"] = fresh

    def end_round(self, server: Server) -> None:
        state = server.state(self)
        state["c"] = control(state, server.theta) + server.total(self)["c"] / server.clients
