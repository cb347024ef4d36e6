"""Stochastic weight averaging on the server (Izmailov et al., 2018; Caldarola et al., 2022)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Count, NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Server, SetupView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SWA(Part):
    """Late in training, let the learning rate go in cycles and evaluate the mean of one server model per cycle.

    Averaging begins at t₀ = int(start · T). γ₁ is the learning rate without SWA. Training never uses w_swa, which
    starts as the server's model at t₀. The server keeps w_swa (1) and n; sends 1 down, 1 up.
    Differs from the paper's Algorithm 1, which starts the count at t/c, and follows its code: a plain mean.
    Align t₀: let c divide it. The rate's cycle counts from round 0, the official collection from t₀.

    Args:
        start: The fraction of the rounds before averaging begins; 1 or more is a number of rounds.
        cycle: c, the rounds per cycle; with 1 the learning rate stays as it is.
        lr_min: γ₂.
        collect: When a model is collected. "official", as in the authors' code: t > t₀ and c divides t − t₀, the first
            model of each cycle if c divides t₀. "paper", as in Algorithm 1 and equation 7: c divides t, the rate is one
            round later in its cycle, so lr = γ₂. "cycle_end": the last round of each cycle of the code's rate, lr = γ₂.
    """

    formula: ClassVar[str] = (
        "η_l = (1 − τ) γ₁ + τ γ₂,  τ = ((t mod c) + 1) / c,  from t₀ on  (collect='paper': t − 1 for t)\n"
        "once a cycle w_swa ← w_swa + (w − w_swa) / (n + 1),  n ← n + 1"
    )
    start: NonNegative = 0.75
    cycle: Count = 10
    lr_min: NonNegative = 1e-4
    collect: Literal["official", "paper", "cycle_end"] = "official"

    def first(self, rounds: int) -> int:
        """t₀, counted from 0."""
        return int(self.start * rounds + 1e-9) if self.start < 1 else int(self.start)

    def phase(self, t: int) -> float:
        """τ, which is 1 where the learning rate is γ₂."""
        return ((t - (self.collect == "paper")) % self.cycle + 1) / self.cycle

    def due(self, t: int, rounds: int) -> bool:
        """Whether the model of round t is collected."""
        first = self.first(rounds)
        if self.collect == "official":
            return t > first and (t - first) % self.cycle == 0
        return t >= first and self.phase(t) == 1

    def idle_rounds(self, rounds: int) -> int:
        return self.first(rounds)

    def check(self, setup: SetupView) -> None:
        rounds = setup.experiment.rounds
        first = self.first(rounds)
        self.require(
            first < rounds, f"start={self.start} is round {first + 1}, after the last of {rounds}: lower start"
        )
        place, below = first % self.cycle, first - first % self.cycle
        if not any(self.due(t, rounds) for t in range(first, rounds)):
            message = (
                "swa: no model is collected in %d rounds; the one before round %d is evaluated; lower start or cycle"
            )
            log.warning(message, rounds, first + 1)
        elif self.collect == "official" and place:
            message = (
                "swa: averaging begins after %d rounds, which cycle=%d does not divide, so model %d of each cycle is "
                "collected instead of the first; write start=%d or start=%d, or choose collect='cycle_end'"
            )
            log.warning(message, first, self.cycle, place + 1, below or below + self.cycle, below + self.cycle)

    def schedule(self, lr: float, server: Server) -> float:
        t = server.round - 1
        if t < self.first(server.rounds) or self.cycle == 1:
            return lr
        phase = self.phase(t)
        return (1 - phase) * lr + phase * self.lr_min

    def end_round(self, server: Server) -> None:
        t, state = server.round - 1, server.state(self)
        if t >= self.first(server.rounds) and "average" not in state:
            state["average"], state["count"] = server.before.clone(), torch.zeros(1, dtype=torch.int64)
        if self.due(t, server.rounds):
            count = int(state["count"]) + 1
            state["average"] = state["average"] + (server.theta - state["average"]) / count
            state["count"] = torch.tensor([count])

    def evaluation_weights(self, server: Server) -> Tensor | None:
        return server.state(self).get("average")
