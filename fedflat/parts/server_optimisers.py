"""The server as an optimiser: FedAvgM (Hsu et al., 2019); FedAdam, FedAdagrad, FedYogi (Reddi et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.method import Part, Server


@dataclass(frozen=True)
class FedAvgM(Part):
    """Heavy-ball momentum on the server.

    beta: β, share of the last direction that is kept; 0 is FedAvg.
    Server keeps v (1); sends 1 down, 1 up. Differs from the exponential-mean form, which is server_lr · (1 − β) here.
    """

    formula: ClassVar[str] = "v ← β v − Δ̄,  w ← w − η_g v"
    beta: float = 0.9

    def __post_init__(self) -> None:
        self.require(0 <= self.beta < 1, f"beta must be at least 0 and below 1, got {self.beta}")

    def step(self, server: Server, delta: Tensor) -> None:
        """Move by the velocity."""
        state = server.state(self)
        state["v"] = state["v"] * self.beta - delta if "v" in state else -delta
        server.theta = server.theta.add(state["v"], alpha=-server.server_lr)


@dataclass(frozen=True)
class FedAdam(Part):
    """Adam on the server: every coordinate moves by its mean update over its typical size.

    beta1, beta2: β₁, β₂. tau: τ, how adaptive (small) or plain (large) the step is. v_init: start of v; None is τ².
    bias_correction: divide m and v by 1 − βᵗ, which the paper's Algorithm 2 does not.
    Server keeps m, v (2); sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "m ← β₁ m + (1 − β₁) Δ̄,  v ← β₂ v + (1 − β₂) Δ̄²\nw ← w + η_g m / (√v + τ)"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.1
    v_init: float | None = None
    bias_correction: bool = False

    def __post_init__(self) -> None:
        _check(self, self.beta1, self.beta2, self.tau, self.v_init)

    def step(self, server: Server, delta: Tensor) -> None:
        """One step of Adam."""
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

    beta1, beta2, tau, v_init: as in FedAdam. Server keeps m, v (2); sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "m ← β₁ m + (1 − β₁) Δ̄,  v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)\nw ← w + η_g m / (√v + τ)"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.1
    v_init: float | None = None

    def __post_init__(self) -> None:
        _check(self, self.beta1, self.beta2, self.tau, self.v_init)

    def step(self, server: Server, delta: Tensor) -> None:
        """One step of Yogi."""
        m, v = _moments(self, server, delta, self.tau, self.v_init)
        square = delta.square()
        m = m * self.beta1 + delta * (1 - self.beta1)
        v = v - (1 - self.beta2) * square * torch.sign(v - square)
        server.state(self).update(m=m, v=v)
        server.theta = server.theta + server.server_lr * m / (v.sqrt() + self.tau)


@dataclass(frozen=True)
class FedAdagrad(Part):
    """Adagrad on the server: a coordinate's step shrinks with all it has moved before.

    tau: τ. v_init: start of v; None is τ². Server keeps v (1); sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "v ← v + Δ̄²,  w ← w + η_g Δ̄ / (√v + τ)"
    tau: float = 0.01
    v_init: float | None = None

    def __post_init__(self) -> None:
        _check(self, 0.0, 0.0, self.tau, self.v_init)

    def step(self, server: Server, delta: Tensor) -> None:
        """One step of Adagrad."""
        _, v = _moments(self, server, delta, self.tau, self.v_init)
        v = v + delta.square()
        server.state(self)["v"] = v
        server.theta = server.theta + server.server_lr * delta / (v.sqrt() + self.tau)


def _moments(part: Part, server: Server, like: Tensor, tau: float, v_init: float | None) -> tuple[Tensor, Tensor]:
    state = server.state(part)
    start = tau**2 if v_init is None else v_init
    return state.get("m", torch.zeros_like(like)), state.get("v", torch.full_like(like, start))


def _check(part: Part, beta1: float, beta2: float, tau: float, v_init: float | None) -> None:
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        part.require(0 <= value < 1, f"{name} must be at least 0 and below 1, got {value}")
    part.require(tau > 0, f"tau must be above 0, got {tau}")
    part.require(v_init is None or v_init >= 0, f"v_init must not be negative, got {v_init}")
