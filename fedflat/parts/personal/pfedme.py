"""pFedMe (Dinh et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import Count, NonNegative
from fedflat.core.part import Backward, Fit, Part
from fedflat.core.tensors import State
from fedflat.core.views import Local


@dataclass(frozen=True)
class PFedMe(Part):
    """Descend on each client's Moreau envelope; its minimiser is the client's own model.

    θ starts a round at the received model and continues from minibatch to minibatch. The experiment's weight decay acts
    on θ; clip and momentum act on w's step.
    The client keeps θ (1) for evaluation; sends 1 down, 1 up; K gradients per step.
    Differs from published codes in keeping a copy of θ: they keep an alias of the weights, which w then overwrites.

    Args:
        lam: λ, the strength of the tie between θ and w.
        steps: K, the steps on θ per minibatch.
        lr: η_p, the learning rate of these steps.
        beta: β, the factor of the server's step.
        mu: μ, extra L2 on θ (0.001 is hidden in the authors' optimiser).
    """

    judged_by: ClassVar[str] = "clients"
    global_gradient: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "each step: K times θ ← θ − η_p (∇F_B(θ) + λ (θ − w_k) + μ θ),  then w_k ← w_k − η_l λ (w_k − θ)\n"
        "server: w ← w + η_g β Σ_S n_i Δ_i / Σ_S n_i"
    )
    lam: NonNegative = 15.0
    steps: Count = 5
    lr: NonNegative = 0.09
    beta: NonNegative = 1.0
    mu: NonNegative = 0.0

    def begin(self, local: Local) -> None:
        local.scratch(self).update(theta=local.theta.clone(), decay=local.weight_decay + self.mu)

    def train(self, local: Local, fit: Fit) -> None:
        decay, local.weight_decay = local.weight_decay, 0.0  # `gradient` applies it to θ instead of w
        fit()
        local.weight_decay = decay

    def gradient(self, local: Local, backward: Backward) -> None:
        scratch, w = local.scratch(self), local.theta.clone()
        theta: Tensor = scratch["theta"]
        for _ in range(self.steps):
            local.theta.copy_(theta)
            backward()
            pull = (theta - w).mul_(self.lam).add_(theta, alpha=scratch["decay"]).add_(local.grad)
            theta.sub_(pull if local.only is None else pull * local.only, alpha=self.lr)
        local.theta.copy_(w)
        local.grad.copy_(w).sub_(theta).mul_(self.lam)

    def end(self, local: Local) -> None:
        local.state(self).update(theta=local.scratch(self)["theta"].clone(), buffers=local.model.buffers.clone())

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        return delta * self.beta  # instead of the server, since the mean over clients is linear

    def personal(self, state: State, theta: Tensor) -> State | None:
        return state or None
