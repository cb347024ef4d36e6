"""Combinations that a few malicious clients cannot bend at will.

All of them look at the updates alone: BatchNorm's statistics, and what parts such as SCAFFOLD send besides, are summed
as ever. Unless `weighting` says otherwise every update counts the same: sample counts are what a client claims.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.errors import TooFewError
from fedflat.flat import bounded
from fedflat.method import Part, Server, Update
from fedflat.participation import sampling
from fedflat.sums import TreeSum

if TYPE_CHECKING:
    from fedflat.task import Task

log = logging.getLogger(__name__)
BLOCK = 1 << 20  # numbers that are copied at once


@dataclass(frozen=True)
class Median(Part):
    """Take the median of every coordinate (Yin et al., 2018): right as long as most updates are honest.

    Where clients' data differ much, it follows the majority and forgets the rest. Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "Δ̄_k = median of Δ_ik over S,  the mean of the two middle ones where |S| is even"
    uniform: ClassVar[bool] = True

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """All but the middle is cut off."""
        deltas = [update.delta for update in updates]
        return _middle(deltas, cut=(len(deltas) - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(Part):
    """Take the mean of every coordinate without its lowest and highest values (Yin et al., 2018).

    beta: β, share of the updates cut off at each end, below ½: as many attackers are harmless. 0 is the plain mean, and
    so is, with a warning, any β that amounts to less than one update. Keeps nothing; sends 1 down, 1 up.
    """

    name: ClassVar[str] = "trimmed_mean"
    formula: ClassVar[str] = "Δ̄_k = mean of Δ_ik over S without the ⌊β|S|⌋ lowest and the ⌊β|S|⌋ highest"
    uniform: ClassVar[bool] = True
    beta: float = 0.1

    def __post_init__(self) -> None:
        self.require(0 <= self.beta < 0.5, f"beta must be at least 0 and below 0.5, got {self.beta}")

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Cut off both ends."""
        kept = list(updates)
        cut = int(self.beta * len(kept) + 1e-9)
        if cut:
            return _middle([update.delta for update in kept], cut)
        if self.beta:
            log.warning("round %d: trimmed_mean(beta=%g) cuts none of %d", server.round, self.beta, len(kept))
        return super().combine(server, kept)


@dataclass(frozen=True)
class Krum(Part):
    """Take the one update that is closest to its neighbours (Blanchard et al., 2017).

    attackers: f, how many malicious participants a round may have; needs more than 2f + 2 (0: any number).
    One client's update stands for all, so that it learns slowly where their data differ. Keeps nothing; sends 1 down,
    1 up.
    """

    formula: ClassVar[str] = (
        "Δ̄ = Δ_i with the least s_i,  s_i = Σ ‖Δ_i − Δ_j‖² over the |S| − f − 2 closest j,  2f + 2 < |S|"
    )
    uniform: ClassVar[bool] = True
    attackers: int = 1

    def __post_init__(self) -> None:
        self.require(self.attackers >= 0, f"attackers must not be negative, got {self.attackers}")

    def check(self, task: Task) -> None:
        """Refuse at once what every round would refuse."""
        _check_asked(self, task, self.attackers)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Choose."""
        return _closest(self, list(updates), self.attackers, keep=1)[0].delta


@dataclass(frozen=True)
class MultiKrum(Part):
    """Take the mean of the updates that are closest to their neighbours (Blanchard et al., 2017).

    attackers: f, as in krum. keep: m, how many to average; None is |S| − f, and with f = 0 the plain mean.
    Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "Δ̄ = mean of the m updates with the least s_i,  s_i as in krum,  m ≤ |S| − f"
    uniform: ClassVar[bool] = True
    attackers: int = 1
    keep: int | None = None

    def __post_init__(self) -> None:
        self.require(self.attackers >= 0, f"attackers must not be negative, got {self.attackers}")
        self.require(self.keep is None or self.keep >= 1, f"keep must be 1 or more, got {self.keep}")

    def check(self, task: Task) -> None:
        """Refuse at once what every round would refuse."""
        _check_asked(self, task, self.attackers)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Choose, and average."""
        heard = list(updates)
        most = len(heard) - self.attackers
        keep = most if self.keep is None else self.keep
        told = f"keep={keep} of {len(heard)} updates leaves no room for attackers={self.attackers}"
        _require_enough(self, keep <= most, told)
        return super().combine(server, _closest(self, heard, self.attackers, keep))


@dataclass(frozen=True)
class CentredClipping(Part):
    """Clip every update's distance to the last combined one, and average (Karimireddy et al., 2021).

    tau: τ, how far a client may pull in a step: about the distance of honest updates from each other (`update_norm` in
    the clients' records shows their lengths). steps: how often it is repeated, from where the last step has led.
    Server keeps the centre (1); sends 1 down, 1 up. Differs from the paper in that clients' momentum is the
    experiment's: the paper clips momenta that last from round to round.
    """

    name: ClassVar[str] = "centred_clipping"
    formula: ClassVar[str] = (
        "v ← v + mean_S (Δ_i − v) min(1, τ/‖Δ_i − v‖),  `steps` times,  Δ̄ = v\n"
        "v starts at the Δ̄ of the last round,  at 0 in the first"
    )
    rank: ClassVar[int] = -1  # sees the combined update before others change it
    uniform: ClassVar[bool] = True
    tau: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        self.require(self.tau > 0, f"tau must be above 0, got {self.tau}")
        self.require(self.steps >= 1, f"steps must be 1 or more, got {self.steps}")

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Move the centre."""
        deltas = [update.delta for update in updates]
        centre = server.state(self).get("centre", torch.zeros_like(deltas[0]))
        for _ in range(self.steps):
            total = TreeSum()
            for delta in deltas:
                total.add(bounded(delta - centre, self.tau))
            centre = centre + total.result().div_(len(deltas))
        return centre

    def adjust(self, server: Server, delta: Tensor) -> Tensor:
        """Remember the centre."""
        server.state(self)["centre"] = delta.clone()
        return delta


@dataclass(frozen=True)
class NormBound(Part):
    """Shorten long updates before they are averaged (Sun et al., 2019). The server does it, whatever clients say.

    limit: M, largest norm of an update; None is the plain mean. A client moves the mean by M/|S| at most, which f of
    them can still do together, round after round. Keeps nothing; sends 1 down, 1 up.
    """

    name: ClassVar[str] = "norm_bound"
    formula: ClassVar[str] = "Δ̄ = mean_S Δ_i min(1, M/‖Δ_i‖)"
    uniform: ClassVar[bool] = True
    limit: float | None = 1.0

    def __post_init__(self) -> None:
        self.require(self.limit is None or self.limit > 0, f"limit must be above 0, got {self.limit}")

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Shorten each as it arrives."""
        return super().combine(server, (replace(u, delta=bounded(u.delta, self.limit)) for u in updates))


def _blocks(deltas: Sequence[Tensor]) -> Iterator[Tensor]:
    """Some coordinates of all updates at a time, one row a client."""
    columns = max(1, BLOCK // len(deltas))
    for low in range(0, deltas[0].numel(), columns):
        yield torch.stack([delta[low : low + columns] for delta in deltas])


def _middle(deltas: Sequence[Tensor], cut: int) -> Tensor:
    """The mean of every coordinate without its `cut` lowest and highest values."""
    return torch.cat([block.sort(dim=0).values[cut : len(deltas) - cut].mean(0) for block in _blocks(deltas)])


def _closest(part: Part, heard: list[Update], attackers: int, keep: int) -> list[Update]:
    """The updates with the `keep` least sums of squared distances to their neighbours, in the order of arrival."""
    _require_majority(part, attackers, len(heard))
    near = max(1, len(heard) - attackers - 2)
    scores = _squared_distances([update.delta for update in heard]).sort(dim=1).values[:, 1 : 1 + near].sum(1)
    return [heard[i] for i in sorted(scores.argsort(stable=True)[:keep].tolist())]


def _squared_distances(deltas: Sequence[Tensor]) -> Tensor:
    """‖Δ_i − Δ_j‖² by differences: products would lose the small distances beside large ones."""
    pairs = torch.stack([torch.pdist(block.double()).square_() for block in _blocks(deltas)]).sum(0)
    squared = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    rows, columns = torch.triu_indices(len(deltas), len(deltas), offset=1)
    squared[rows, columns] = squared[columns, rows] = pairs
    return squared


def _require_majority(part: Part, attackers: int, participants: float) -> None:
    enough = attackers == 0 or participants > 2 * attackers + 2
    need = f"attackers={attackers} needs {2 * attackers + 3} participants or more"
    told = f"{need}, but a round has {participants}: ask more clients, or expect fewer attackers"
    _require_enough(part, enough, told)


def _require_enough(part: Part, enough: bool, message: str) -> None:
    if not enough:
        raise TooFewError(f"{part.name}: {message}")


def _check_asked(part: Part, task: Task, attackers: int) -> None:
    law, value = sampling(task.experiment.participation)
    if task.sampled and law != "bernoulli":
        _require_majority(part, attackers, value if law == "uniform" else task.clients)
