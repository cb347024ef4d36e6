"""Stochastic weight averaging on the server (Izmailov et al., 2018; Caldarola et al., 2022)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.method import Part, Server

if TYPE_CHECKING:
    from fedflat.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SWA(Part):
    """Late in training let the learning rate go in cycles, and evaluate the mean of one server model a cycle.

    This begins at t₀ = int(start · T). γ₁ is the learning rate without SWA. Training never sees w_swa.

    start: share of the rounds before averaging begins (a number of rounds if it is 1 or more). cycle: c; with 1 the
    learning rate stays. lr_min: γ₂.
    collect: "official" takes the first model of each cycle, when t > t₀ and c divides t − t₀; "cycle_end" the last,
    made at lr = γ₂. Server keeps w_swa (1) and n; sends 1 down, 1 up.
    Differs from the paper's Algorithm 1, which starts the count at t/c, and follows its code: a plain mean.
    """

    formula: ClassVar[str] = (
        "η_l = (1 − τ) γ₁ + τ γ₂,  τ = ((t mod c) + 1) / c,  from t₀ on\n"
        "once a cycle w_swa ← w_swa + (w − w_swa) / (n + 1),  n ← n + 1"
    )
    start: float = 0.75
    cycle: int = 10
    lr_min: float = 1e-4
    collect: str = "official"

    def __post_init__(self) -> None:
        self.require(self.start >= 0, f"start must not be negative, got {self.start}")
        self.require(self.cycle >= 1 and self.cycle == int(self.cycle), f"cycle must be 1 or more, got {self.cycle}")
        self.require(self.lr_min >= 0, f"lr_min must not be negative, got {self.lr_min}")
        self.require(
            self.collect in ("official", "cycle_end"), f"collect is 'official' or 'cycle_end', not {self.collect!r}"
        )

    def first(self, rounds: int) -> int:
        """t₀."""
        return int(self.start * rounds + 1e-9) if self.start < 1 else int(self.start)

    def due(self, t: int, rounds: int) -> bool:
        """Whether the model of round t is collected."""
        first = self.first(rounds)
        if self.collect == "cycle_end":
            return t >= first and (t + 1) % self.cycle == 0
        return t > first and (t - first) % self.cycle == 0

    def check(self, task: Task) -> None:
        """Refuse an average that would never begin."""
        rounds = task.experiment.rounds
        first = self.first(rounds)
        self.require(first < rounds, f"start={self.start} is round {first + 1}, after the last of {rounds}")
        if not any(self.due(t, rounds) for t in range(first, rounds)):
            told = "swa: no model is collected in %d rounds, and the one before round %d stays; lower start or cycle"
            log.warning(told, rounds, first + 1)

    def schedule(self, lr: float, server: Server) -> float:
        """The cyclical learning rate."""
        t = server.round - 1
        if t < self.first(server.rounds) or self.cycle == 1:
            return lr
        phase = (t % self.cycle + 1) / self.cycle
        return (1 - phase) * lr + phase * self.lr_min

    def conclude(self, server: Server) -> None:
        """Collect."""
        t, state = server.round - 1, server.state(self)
        if t >= self.first(server.rounds) and "average" not in state:
            state["average"], state["count"] = server.origin.clone(), torch.zeros(1, dtype=torch.int64)
        if self.due(t, server.rounds):
            count = int(state["count"]) + 1
            state["average"] = state["average"] + (server.theta - state["average"]) / count
            state["count"] = torch.tensor([count])

    def averaged(self, server: Server) -> Tensor | None:
        """The mean so far; at first the model with which averaging began."""
        return server.state(self).get("average")
