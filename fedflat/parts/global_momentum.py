"""Momentum of the whole federation: FedCM (Xu et al., 2021), FedACG (Kim et al., 2024), FedWMSAM (Li et al., 2025)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedflat.core.fields import BelowOne, Fraction, NonNegative, PositiveFraction
from fedflat.core.part import Backward, Part
from fedflat.core.rows import add_, dots, norms, unit
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts.direction import (
    MIXTURE,
    ONE_MODEL,
    last_direction,
    remember_direction,
    require_known_steps,
    warn_of_growth,
)
from fedflat.parts.drift import CONTROL, control, refreshed_control

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedCM(Part):
    """Mix every local gradient with the direction in which the whole federation moved in the last round.

    K is the mean number of local steps. `fedcm(alpha=α)+sam(rho=ρ)` is `mofedsam(beta=α, rho=ρ)`.
    The server keeps m (1), zero at first; sends 2 down, 1 up.
    Differs from the paper in the unit of η_g, which multiplies the mean update; the paper's multiplies m.

    Args:
        alpha: α, the weight of the fresh gradient; 1 is FedAvg with uniform weights.
    """

    formula: ClassVar[str] = "g ← α g + (1 − α) m\nserver: w ← w + η_g mean_S Δ_i,  m ← −mean_S Δ_i / (K η_l)"
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = 10  # mixes after the corrections of other parts
    uniform: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (MIXTURE,)
    alone_in: ClassVar[Mapping[str, str]] = ONE_MODEL
    alpha: PositiveFraction = 0.1

    def check(self, setup: SetupView) -> None:
        require_known_steps(setup, self)
        warn_of_growth(setup, self, self.alpha)

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"m": last_direction(server, self)}

    def correct_gradient(self, local: Local) -> None:
        if self.alpha < 1:
            local.grad.mul_(self.alpha).add_(local.received(self)["m"], alpha=1 - self.alpha)

    def end_round(self, server: Server) -> None:
        remember_direction(server, self)


@dataclass(frozen=True)
class FedACG(Part):
    """Let clients start where the server's momentum will carry it, as Nesterov does, and stay near that point.

    The server keeps m (1), zero at first, and sends w̃ instead of w; sends 1 down, 1 up.
    Differs from the authors' code in touching neither BatchNorm's statistics nor the learning rate within a round.

    Args:
        lam: λ, the share of the last momentum that is kept; at 0 the method is FedProx with μ = β and uniform weights.
        beta: β, the strength of the pull towards w̃; twice the factor of ‖w_k − w̃‖² in the authors' code.
    """

    formula: ClassVar[str] = "sent: w̃ = w + λ m;  g ← g + β (w_k − w̃)\nserver: m ← λ m + mean_S Δ_i,  w ← w + m"
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "its momentum"
    lam: BelowOne = 0.85
    beta: NonNegative = 0.002

    def outgoing(self, server: Server) -> Tensor:
        m = server.state(self).get("m")
        return server.theta if m is None or self.lam == 0 else server.theta.add(m, alpha=self.lam)

    def begin(self, local: Local) -> None:
        local.proximal += self.beta

    def correct_gradient(self, local: Local) -> None:
        if self.beta > 0:
            local.grad.add_(local.theta - local.origin, alpha=self.beta)

    def step(self, server: Server, delta: Tensor) -> None:
        state = server.state(self)
        state["m"] = state["m"] * self.lam + delta if "m" in state else delta.clone()
        server.theta = server.theta + state["m"]


@dataclass(frozen=True)
class FedWMSAM(Part):
    """FedCM with SCAFFOLD's correction and one gradient per step, taken off the path that the momentum predicts.

    m_i = m + α/(1 − α) (c − c_i). v_i = 1 + cos(Δ_i, m), 0 where either is zero. c_i is refreshed as in SCAFFOLD.
    The client keeps c_i (1), the server c, m (2) and α; sends 3 down, 2 up and a number each way.
    Paper and code contradict each other: this takes the perturbation of the paper, m and the rule of α of the code.

    Args:
        alpha: α₀, the weight of the fresh gradient at first.
        rho: ρ, the length of the perturbation.
        rate: λ, how fast α follows the clients' similarity; 0 keeps α₀, which then must be above 0.
    """

    formula: ClassVar[str] = (
        "ε = ρ unit(w + k m_i − w_k),  g ← α ∇L(w_k + ε) + (1 − α) m_i\n"
        "server: w ← w + η_g mean_S Δ_i,  c ← c + (1/N) Σ_S (c_i⁺ − c_i),  m ← −mean_S Δ_i / (K η_l)\n"
        "α ← (1 − λ) α + λ min(0.9, max(0.1, mean_S v_i))"
    )
    global_gradient: ClassVar[bool] = True
    rank: ClassVar[int] = 10  # mixes after the corrections of other parts
    uniform: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (MIXTURE, CONTROL)
    alone_in: ClassVar[Mapping[str, str]] = ONE_MODEL
    alpha: BelowOne = 0.1
    rho: NonNegative = 0.01
    rate: Fraction = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.alpha > 0 or self.rate > 0, "alpha=0 with rate=0 never learns: no gradient would ever count")

    def check(self, setup: SetupView) -> None:
        require_known_steps(setup, self)
        if setup.experiment.momentum > 0:
            log.warning(
                "fedwmsam has a momentum of its own; momentum=%g acts on top of it, so that clients leave the path on "
                "which its perturbation relies. Set momentum=0",
                setup.experiment.momentum,
            )

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        state = server.state(self)
        return {"m": last_direction(server, self), "c": control(state, server.theta), "alpha": self._alpha(server)}

    def _alpha(self, server: Server) -> Tensor:
        first = server.theta.new_tensor([self.alpha], dtype=torch.float64)
        return server.state(self).get("alpha", first)

    def begin(self, local: Local) -> None:
        received, own = local.received(self), control(local.state(self), local.theta)
        alpha = float(received["alpha"])
        mixed = received["m"] + (received["c"] - own).mul_(alpha / (1 - alpha))
        local.scratch(self).update(alpha=alpha, mixed=mixed)

    def gradient(self, local: Local, backward: Backward) -> None:
        if self.rho == 0 or local.steps == 0:  # the first step starts on the path
            backward()
            return
        ahead = add_(local.origin.clone(), local.scratch(self)["mixed"], local.steps).sub_(local.theta)
        with local.displaced(by=self.rho * unit(local.exchanged(ahead)), track_buffers=True):
            backward()

    def correct_gradient(self, local: Local) -> None:
        alpha = local.scratch(self)["alpha"]
        local.grad.mul_(alpha).add_(local.scratch(self)["mixed"], alpha=1 - alpha)

    def end(self, local: Local) -> None:
        state, received = local.state(self), local.received(self)
        own = control(state, local.theta)
        fresh = refreshed_control(local, own, received["c"], local.weighted_steps)
        similarity = _similarity(local.exchanged(local.theta - local.origin), received["m"])
        local.send(self, c=fresh - own, similarity=similarity)
        state["c"] = fresh

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        told = float(update.sent.get(self.name, {}).get("similarity", torch.zeros(1)))
        return None if 0 <= told <= 2 + 1e-9 else f"a similarity of {told:g}, not from 0 to 2"

    def end_round(self, server: Server) -> None:
        state, total = server.state(self), server.total(self)
        state["c"] = control(state, server.theta) + total["c"] / server.clients
        wanted = (total["similarity"] / server.participants).clamp(0.1, 0.9)
        state["alpha"] = self._alpha(server) * (1 - self.rate) + wanted * self.rate
        remember_direction(server, self)

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        return {"fedwmsam_alpha": float(self._alpha(server))}


def _similarity(delta: Tensor, m: Tensor) -> Tensor:
    """1 + the cosine between two vectors; 0 where one of them is zero."""
    delta, m = delta.double(), m.double()
    lengths = norms(delta) * norms(m)
    cosine = dots(delta, m) / torch.where(lengths > 0, lengths, 1.0)
    return torch.where(lengths > 0, 1 + cosine, 0.0)
