"""The server as an optimiser: FedAvgM (Hsu et al., 2019); FedAdam, FedAdagrad, FedYogi (Reddi et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core.fields import BelowOne, NonNegative, Positive
from fedflat.core.part import Part
from fedflat.core.views import Server


@dataclass(frozen=True)
class FedAvgM(Part):
    """Heavy-ball momentum on the server.

    The server keeps v (1); sends 1 down, 1 up. For the exponential-mean form, multiply server_lr by 1 − β.

    Args:
        beta: β, the fraction of the last direction that is kept; 0 is FedAvg.
    """

    formula: ClassVar[str] = "v ← β v − Δ̄,  w ← w − η_g v"
    beta: BelowOne = 0.9

    def step(self, server: Server, delta: Tensor) -> None:
        state = server.state(self)
        state["v"] = state["v"] * self.beta - delta if "v" in state else -delta
        server.theta = server.theta.add(state["v"], alpha=-server.server_lr)


@dataclass(frozen=True)
class FedAdam(Part):
    """Adam on the server: every coordinate moves by its mean update divided by its typical size.

    The server keeps m, v (2); sends 1 down, 1 up.

    Args:
        beta1, beta2: β₁, β₂.
        tau: τ; a small one makes the step adaptive, a large one plain.
        v_init: Start of v; None is τ².
        bias_correction: Divide m and v by 1 − βᵗ, which the paper's Algorithm 2 does not.
    """

    formula: ClassVar[str] = "m ← β₁ m + (1 − β₁) Δ̄,  v ← β₂ v + (1 − β₂) Δ̄²\nw ← w + η_g m / (√v + τ)"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    tau: Positive = 0.1
    v_init: NonNegative | None = None
    bias_correction: bool = False

    def step(self, server: Server, delta: Tensor) -> None:
        m, v = _moments(self, server, delta, self.tau, self.v_init)
        m = m * self.beta1 + delta * (1 - self.beta1)
        v = v * self.beta2 + delta.square() * (1 - self.beta2)
        server.state(self).update(m=m, v=v)
        if self.bias_correction:
            m, v = m / (1 - self.beta1**server.round), v / (1 - self.beta2**server.round)
        server.theta = server.theta + server.server_lr * m / (v.sqrt() + self.tau)


@dataclass(frozen=True)
class FedYogi(Part):
    """Yogi on the server: as FedAdam, but v moves by at most (1 − β₂) Δ̄².

    The server keeps m, v (2); sends 1 down, 1 up.

    Args:
        beta1, beta2, tau, v_init: As in FedAdam.
    """

    formula: ClassVar[str] = "m ← β₁ m + (1 − β₁) Δ̄,  v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)\nw ← w + η_g m / (√v + τ)"
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    tau: Positive = 0.1
    v_init: NonNegative | None = None

    def step(self, server: Server, delta: Tensor) -> None:
        m, v = _moments(self, server, delta, self.tau, self.v_init)
        square = delta.square()
        m = m * self.beta1 + delta * (1 - self.beta1)
        v = v - (1 - self.beta2) * square * torch.sign(v - square)
        server.state(self).update(m=m, v=v)
        server.theta = server.theta + server.server_lr * m / (v.sqrt() + self.tau)


@dataclass(frozen=True)
class FedAdagrad(Part):
    """Adagrad on the server: a coordinate's step shrinks with the sum of its squared updates.

    The server keeps v (1), and m if β₁ > 0; sends 1 down, 1 up.

    Args:
        tau: τ.
        v_init: Start of v; None is τ².
        beta1: β₁, the share of the last m that is kept; the paper's runs have 0.
    """

    formula: ClassVar[str] = "m ← β₁ m + (1 − β₁) Δ̄,  v ← v + Δ̄²,  w ← w + η_g m / (√v + τ)"
    tau: Positive = 0.01
    v_init: NonNegative | None = None
    beta1: BelowOne = 0.0

    def step(self, server: Server, delta: Tensor) -> None:
        m, v = _moments(self, server, delta, self.tau, self.v_init)
        v = v + delta.square()
        server.state(self)["v"] = v
        if self.beta1 > 0:
            delta = server.state(self)["m"] = m * self.beta1 + delta * (1 - self.beta1)
        server.theta = server.theta + server.server_lr * delta / (v.sqrt() + self.tau)


def _moments(part: Part, server: Server, like: Tensor, tau: float, v_init: float | None) -> tuple[Tensor, Tensor]:
    state = server.state(part)
    start = tau**2 if v_init is None else v_init
    return state.get("m", torch.zeros_like(like)), state.get("v", torch.full_like(like, start))
