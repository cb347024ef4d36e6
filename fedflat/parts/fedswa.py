"""FedSWA and FedMoSWA (Liu et al., 2025): a learning rate that falls within the round. Not the part `swa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedflat.core.fields import Fraction, NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import CONTROL, control, refreshed_control, warn_of_momentum
from fedflat.parts.requirements import require_sgd


@dataclass(frozen=True)
class FedSWA(Part):
    """Let the learning rate fall within every round, and let the server overshoot the mean of the local models.

    Keeps nothing; sends 1 down, 1 up.
    Differs from the authors' code, which falls from 2η_l to 0 and steps by 1: ρ = 0, α = 1 at twice the lr.

    Args:
        rho: ρ, the share of the learning rate that is left at the end of a round.
        alpha: α, the server's step; ρ = α = 1 is FedAvg with uniform weights.
    """

    formula: ClassVar[str] = "η_k = η_l (1 − (1 − ρ) k/K_i),  k = 0 … K_i − 1\nserver: w ← w + α mean_S Δ_i"
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "alpha is its server learning rate"
    rho: Fraction = 0.1
    alpha: NonNegative = 1.5

    def step_rate(self, local: Local, step: int, steps: int) -> float:
        return 1 - (1 - self.rho) * step / steps

    def step(self, server: Server, delta: Tensor) -> None:
        server.theta = server.theta.add(delta, alpha=self.alpha)


@dataclass(frozen=True)
class FedMoSWA(Part):
    """FedSWA with control variates whose common part is a moving mean.

    The client keeps c_i (1), the server m (1), zero at first; sends 2 down, 2 up (1 up would do with option 2).
    Differs from the authors' code, which has a constant learning rate and keeps c_i per worker process.

    Args:
        rho, alpha: As in FedSWA.
        gamma: γ, how fast m follows the clients. With ρ = α = γ = 1 and everybody in every round this is SCAFFOLD.
        option: 2 refreshes c_i by the formula, 1 by c_i⁺ = ∇F_i(w), the gradient over all samples of the client.
    """

    formula: ClassVar[str] = (
        "g ← g + m − c_i,  η_k as in FedSWA,  afterwards c_i⁺ = c_i − m − Δ_i / Σ_k η_k\n"
        "server: w ← w + α mean_S Δ_i,  m ← m + γ mean_S (c_i⁺ − m)"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "alpha is its server learning rate"
    claims: ClassVar[tuple[str, ...]] = (CONTROL,)
    rho: Fraction = 0.1
    alpha: NonNegative = 1.5
    gamma: Fraction = 0.2
    option: Literal[1, 2] = 2

    def check(self, setup: SetupView) -> None:
        if self.option == 2:
            require_sgd(f"{self.name} with option=2", setup, "the control variate c_i")
            warn_of_momentum(setup, self, "option=1")

    def step_rate(self, local: Local, step: int, steps: int) -> float:
        return 1 - (1 - self.rho) * step / steps

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
        if self.option == 1:
            state["c"] = local.full_gradient(local.given)
        else:
            state["c"] = refreshed_control(local, own, common, local.weighted_steps)
        local.send(self, c=state["c"].clone())

    def step(self, server: Server, delta: Tensor) -> None:
        server.theta = server.theta.add(delta, alpha=self.alpha)

    def end_round(self, server: Server) -> None:
        state, fresh = server.state(self), server.total(self)["c"] / server.participants
        common = control(state, server.theta)
        state["c"] = common + (fresh - common) * self.gamma
