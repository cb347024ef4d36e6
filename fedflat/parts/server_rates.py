"""Server steps made of updates or losses: FedExP (Jhunjhunwala et al., 2023) and q-FedAvg (Li et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.rows import norms
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts.requirements import LENGTH, differs

FITTED = 1e-4  # a client with a smaller loss has nothing more to learn


@dataclass(frozen=True)
class FedExP(Part):
    """Extrapolate: choose the server's learning rate in every round, the larger the more the updates disagree.

    p_i are the weights of the mean. The mean of the last two models is evaluated, training goes on from w. η is
    recorded as `fedexp_rate`. The server keeps the last model (1); sends 1 down, 1 up and one number up.

    Args:
        eps: ε, which keeps η small while updates are small.
        variant: "paper" for the formula; "code" puts |S| ε (η_l(t)/η_l(1))² in the place of ε.
    """

    formula: ClassVar[str] = "η = max(1, Σ_S p_i ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))),  w ← w + η Δ̄,  evaluated: (w + w_last) / 2"
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = 1  # an average of `swa` is evaluated rather than this one
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "it chooses the server's learning rate itself"
    eps: NonNegative = 0.001
    variant: Literal["paper", "code"] = "paper"

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        weight = 1.0 if local.uniform else local.samples
        local.send(self, square=weight * norms(delta.double()).square())
        return delta

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        weight = 1.0 if setup.uniform else float(setup.federation.size(update.client))
        return differs(update, self.name, "square", weight * float(norms(update.delta.double()).square()))

    def step(self, server: Server, delta: Tensor) -> None:
        state = server.state(self)
        state["last"] = server.before.clone()
        if self.variant == "code":
            state.setdefault("first_lr", torch.tensor([server.lr], dtype=torch.float64))
        server.theta = server.theta.add(delta, alpha=self._rate(server))

    def _rate(self, server: Server) -> float:
        """η."""
        eps = self.eps
        if self.variant == "code":
            first = float(server.state(self)["first_lr"])
            eps *= server.participants * (server.lr / first) ** 2 if first else 1.0
        mean = float(server.total(self)["square"]) / (server.participants if server.uniform else server.samples)
        common = 2 * (float(norms(server.delta.double()).square()) + eps)
        return max(1.0, mean / common) if common > 0 else 1.0

    def evaluation_weights(self, server: Server) -> Tensor | None:
        last = server.state(self).get("last")
        return None if last is None or server.round < 2 else (server.theta + last) / 2

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        return {"fedexp_rate": self._rate(server)} if rows else {}


@dataclass(frozen=True)
class QFedAvg(Part):
    """Be fair: the larger a client's loss at the received model, the more its update counts.

    F_i is the client's loss over all its samples at w, plus 1e-10. Both sums are scaled by η_l, which changes nothing.
    Keeps nothing; sends 1 down, 1 up and one number up; one more pass over the client's data per round.
    With several local steps or momentum, 1/η_l is only a guess of the Lipschitz constant, as in the authors' code.

    Args:
        q: q, the degree of fairness; 0 is FedAvg with uniform weights, a large one follows the worst client. Where F^q
            leaves the range of the numbers, an error says so.
    """

    formula: ClassVar[str] = "w ← w + Σ_S F_i^q Δ_i / Σ_S h_i,  h_i = F_i^q + q F_i^(q−1) ‖Δ_i‖² / η_l"
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the losses of the clients determine it"
    claims: ClassVar[tuple[str, ...]] = (LENGTH,)
    q: NonNegative = 1.0

    def check(self, setup: SetupView) -> None:
        mean = setup.evaluator is not None and setup.evaluator.name == "selected"
        self.require(self.q == 0 or not mean, "it knows no mean of the local models: leave out evaluated='selected'")

    def begin(self, local: Local) -> None:
        if self.q > 0:
            local.scratch(self)["loss"] = local.full_loss(local.given) + 1e-10

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        if self.q == 0:
            local.send(self, h=torch.ones_like(norms(delta), dtype=torch.float64))
            return delta
        loss: Tensor = local.scratch(self)["loss"]
        weight = loss**self.q
        square = norms(delta.double()).square() / local.lr if local.lr > 0 else delta.new_zeros(1)
        local.send(self, h=weight + self.q * loss ** (self.q - 1) * square)
        return delta.mul(weight.to(delta.dtype))

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        told = float(update.sent.get(self.name, {}).get("h", torch.ones(1)))
        return None if told > 0 else f"h={told:g}, which is not above 0"

    def step(self, server: Server, delta: Tensor) -> None:
        total = float(server.total(self)["h"])
        self._require_range(delta, total / server.participants)
        scale = min(server.participants / total, 1 / torch.finfo(delta.dtype).tiny)
        server.theta = server.theta.add(delta, alpha=scale)
        server.delta = delta * scale  # for parts that follow the last direction: losses must not scale it

    def _require_range(self, delta: Tensor, h: float) -> None:
        """Refuse a q for which F^q Δ leaves the range of its type, given the mean of h; who fits may stand still."""
        dtype = str(delta.dtype).removeprefix("torch.")
        vanishes = h == 0 or (h < torch.finfo(delta.dtype).tiny and h ** (1 / self.q) > FITTED)
        what, wider = "vanish" if vanishes else "overflow", "" if dtype == "float64" else ", or dtype='float64'"
        self.require(
            not vanishes and (math.isnan(h) or bool(delta.isfinite().all())),
            f"q={self.q:g} makes updates {what} in {dtype}, since they are multiplied by a loss to the power of q (h_i "
            f"is {h:.3g} in the mean): take a smaller q{wider}",
        )
