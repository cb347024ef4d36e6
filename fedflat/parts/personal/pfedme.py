"""pFedMe (Dinh et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.method import Evaluate, Fit, Local, Part, Server, State


@dataclass(frozen=True)
class PFedMe(Part):
    """Descend on each client's Moreau envelope; its minimiser is the client's own model.

    lam: λ. steps: K. lr: η_p. beta: β. mu: extra L2 on θ (0.001 is hidden in the authors' optimiser).
    θ starts a round at the model received and goes on from minibatch to minibatch. The experiment's weight decay acts
    on θ; clip and momentum act on w's step. Client keeps θ (1) for evaluation; sends 1 down, 1 up; K gradients a step.
    Differs from published codes in keeping a copy of θ: they keep an alias of the weights that w then overwrites.
    """

    formula: ClassVar[str] = (
        "each step: K times θ ← θ − η_p (∇F_B(θ) + λ (θ − w_k) + μ θ),  then w_k ← w_k − η_l λ (w_k − θ)\n"
        "server: w ← w + η_g β Σ_S n_i Δ_i / Σ_S n_i"
    )
    lam: float = 15.0
    steps: int = 5
    lr: float = 0.09
    beta: float = 1.0
    mu: float = 0.0

    def __post_init__(self) -> None:
        self.require(self.lam >= 0, f"lam must not be negative, got {self.lam}")
        self.require(self.steps >= 1, f"steps must be 1 or more, got {self.steps}")
        self.require(self.lr >= 0, f"lr must not be negative, got {self.lr}")
        self.require(self.beta >= 0, f"beta must not be negative, got {self.beta}")
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")

    def begin(self, local: Local) -> None:
        """θ starts at the model received."""
        local.scratch(self).update(theta=local.theta.clone(), decay=local.weight_decay + self.mu)

    def train(self, local: Local, fit: Fit) -> None:
        """Weight decay is θ's, not w's."""
        decay, local.weight_decay = local.weight_decay, 0.0
        fit()
        local.weight_decay = decay

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """K steps on θ, then λ (w − θ)."""
        if local.branch != "global":
            evaluate()
            return
        scratch, w = local.scratch(self), local.theta.clone()
        theta: Tensor = scratch["theta"]
        for _ in range(self.steps):
            local.theta.copy_(theta)
            evaluate()
            pull = (theta - w).mul_(self.lam).add_(theta, alpha=scratch["decay"]).add_(local.grad)
            theta.sub_(pull if local.only is None else pull * local.only, alpha=self.lr)
        local.theta.copy_(w)
        local.grad.copy_(w).sub_(theta).mul_(self.lam)

    def end(self, local: Local) -> None:
        """Keep θ."""
        local.state(self).update(theta=local.scratch(self)["theta"].clone(), buffers=local.model.buffers.clone())

    def adjust(self, server: Server, delta: Tensor) -> Tensor:
        """A share β of the way."""
        return delta * self.beta

    def personal(self, state: State, theta: Tensor) -> State | None:
        """θ."""
        return state or None
