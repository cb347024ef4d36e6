"""Combinations of updates that a few malicious clients cannot control.

Those that choose or sort (`robust = "messages"`) treat what parts such as SCAFFOLD send like more coordinates of the
update; those that shorten look at the update alone, and the round loop warns. BatchNorm statistics are averaged as
usual. Unless `weighting` says otherwise, every update has the same weight, since a client may lie about its size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedflat.core.fields import Count, Natural, Positive, PositiveFraction, Range
from fedflat.core.part import Part
from fedflat.core.participation import sampling
from fedflat.core.rows import bounded, norms
from fedflat.core.sums import TreeSum
from fedflat.core.views import Server, SetupView, Update
from fedflat.errors import TooFewError

log = logging.getLogger(__name__)
BLOCK = 1 << 20  # the numbers that are copied at once


@dataclass(frozen=True)
class Median(Part):
    """Take the median of every coordinate (Yin et al., 2018), which is reliable while most updates are honest.

    Where clients' data differ much, it follows the majority and ignores the rest. Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "Δ̄_k = median of Δ_ik over S,  the mean of the two middle ones where |S| is even"
    uniform: ClassVar[bool] = True

    @property
    def robust(self) -> str:
        return "messages"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        deltas = [update.delta for update in updates]
        return _middle(deltas, cut=(len(deltas) - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean(Part):
    """Take the mean of every coordinate without its lowest and highest values (Yin et al., 2018).

    Keeps nothing; sends 1 down, 1 up.

    Args:
        beta: β, the fraction of updates removed at each end, below ½; attackers up to this fraction are harmless. 0 is
            the plain mean; so is, with a warning, any β that amounts to less than one update.
    """

    name: ClassVar[str] = "trimmed_mean"
    formula: ClassVar[str] = "Δ̄_k = mean of Δ_ik over S without the ⌊β|S|⌋ lowest and the ⌊β|S|⌋ highest"
    uniform: ClassVar[bool] = True
    beta: Annotated[float, Range(0, 0.5, open_high=True)] = 0.1

    @property
    def robust(self) -> str:
        return "messages" if self.beta else ""

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        kept = list(updates)
        cut = int(self.beta * len(kept) + 1e-9)
        if cut:
            return _middle([update.delta for update in kept], cut)
        if self.beta:
            log.warning("round %d: trimmed_mean(beta=%g) cuts none of %d updates", server.round, self.beta, len(kept))
        return super().combine(server, kept)


@dataclass(frozen=True)
class Krum(Part):
    """Take the one update that is closest to its neighbours (Blanchard et al., 2017).

    One client's update replaces the mean, so training is slow where the clients' data differ.
    Keeps nothing; sends 1 down, 1 up.

    Args:
        attackers: f, the largest number of malicious participants per round; unless it is 0, |S| must exceed 2f + 2.
    """

    formula: ClassVar[str] = (
        "Δ̄ = Δ_i with the least s_i,  s_i = Σ ‖Δ_i − Δ_j‖² over the |S| − f − 2 closest j,  2f + 2 < |S|"
    )
    uniform: ClassVar[bool] = True
    attackers: Natural = 1

    @property
    def robust(self) -> str:
        return "messages"

    def check(self, setup: SetupView) -> None:
        _check_asked(self, setup, self.attackers)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        return _closest(self, list(updates), self.attackers, keep=1)[0].delta


@dataclass(frozen=True)
class MultiKrum(Part):
    """Take the mean of the updates that are closest to their neighbours (Blanchard et al., 2017).

    Keeps nothing; sends 1 down, 1 up.

    Args:
        attackers: f, as in krum.
        keep: m, the number of updates to average; None is |S| − f, which for f = 0 is the plain mean.
    """

    formula: ClassVar[str] = "Δ̄ = mean of the m updates with the least s_i,  s_i as in krum,  m ≤ |S| − f"
    uniform: ClassVar[bool] = True
    attackers: Natural = 1
    keep: Count | None = None

    @property
    def robust(self) -> str:
        return "" if self.attackers == 0 and self.keep is None else "messages"

    def check(self, setup: SetupView) -> None:
        _check_asked(self, setup, self.attackers)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        received = list(updates)
        most = len(received) - self.attackers
        keep = most if self.keep is None else self.keep
        message = (
            f"keep={keep} of {len(received)} updates leaves no room for attackers={self.attackers}: lower one of them"
        )
        require_enough(self, keep <= most, message)
        return super().combine(server, _closest(self, received, self.attackers, keep))


@dataclass(frozen=True)
class CentredClipping(Part):
    """Clip every update's distance to the last combined one, and average (Karimireddy et al., 2021).

    The server keeps the centre (1); sends 1 down, 1 up. Differs from the paper in the clients' momentum, which is the
    experiment's: the paper clips momenta that last from round to round.

    Args:
        tau: τ, the largest distance by which a client may pull per step: about the distance of honest updates from each
            other (`update_norm` in the clients' records shows their lengths).
        steps: The number of steps; each starts where the previous one ended.
        quantile: Take as τ this quantile of the distances of the round instead, 0.5 for their median.
    """

    name: ClassVar[str] = "centred_clipping"
    formula: ClassVar[str] = (
        "v ← v + mean_S (Δ_i − v) min(1, τ/‖Δ_i − v‖),  `steps` times,  Δ̄ = v\n"
        "v starts at the Δ̄ of the last round,  at 0 in the first"
    )
    rank: ClassVar[int] = -1  # sees the combined update before other parts change it
    uniform: ClassVar[bool] = True
    tau: Positive = 1.0
    steps: Count = 1
    quantile: PositiveFraction | None = None

    @property
    def robust(self) -> str:
        return "update"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        deltas = [update.delta for update in updates]
        centre = server.state(self).get("centre", torch.zeros_like(deltas[0]))
        for _ in range(self.steps):
            total = TreeSum[Tensor]()
            tau = self.tau if self.quantile is None else usual_norm([d - centre for d in deltas], self.quantile)
            for delta in deltas:
                total.add(bounded(delta - centre, tau))
            centre = centre + total.result().div_(len(deltas))
        return centre

    def end_round(self, server: Server) -> None:
        server.state(self)["centre"] = server.delta.clone()


@dataclass(frozen=True)
class NormBound(Part):
    """Shorten long updates before they are averaged (Sun et al., 2019). The server does it, so no client is trusted.

    A client moves the mean by at most M/|S|; f attackers together can move it f times as far, in every round.
    Keeps nothing; sends 1 down, 1 up.

    Args:
        limit: M, the largest norm of an update; None is the plain mean.
        quantile: Take as M this quantile of the norms of the round instead, 0.5 for their median.
    """

    name: ClassVar[str] = "norm_bound"
    formula: ClassVar[str] = "Δ̄ = mean_S Δ_i min(1, M/‖Δ_i‖)"
    uniform: ClassVar[bool] = True
    limit: Positive | None = 1.0
    quantile: PositiveFraction | None = None

    @property
    def robust(self) -> str:
        return "update"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        limit = self.limit
        if self.quantile is not None:
            updates = list(updates)
            limit = usual_norm([update.delta for update in updates], self.quantile)
        return super().combine(server, (replace(u, delta=bounded(u.delta, limit)) for u in updates))


@dataclass(frozen=True)
class GeometricMedian(Part):
    """Take the point with the least sum of distances to all updates (RFA: Pillutla et al., 2022).

    Reliable while most updates are honest. Found by smoothed steps of Weiszfeld. Keeps nothing; sends 1 down, 1 up.

    Args:
        steps: The number of steps.
        nu: ν, the least distance that counts, in units of the median distance from the coordinates' median.
    """

    name: ClassVar[str] = "geometric_median"
    formula: ClassVar[str] = "Δ̄ ← Σ_S a_i Δ_i / Σ_S a_i,  a_i = 1/max(ν, ‖Δ_i − Δ̄‖),  `steps` times from the median"
    uniform: ClassVar[bool] = True
    steps: Count = 16
    nu: Positive = 1e-4

    @property
    def robust(self) -> str:
        return "messages"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        deltas = [update.delta for update in updates]
        centre = _middle(deltas, cut=(len(deltas) - 1) // 2)  # no attacker can move the start, nor the least distance
        least = self.nu * usual_norm([delta - centre for delta in deltas], 0.5)
        for _ in range(self.steps):
            distances = torch.cat([norms(delta - centre) for delta in deltas])
            centre = _weighted(deltas, 1 / distances.clamp(min=max(least, 1e-30)))
        return centre


def _weighted(deltas: Sequence[Tensor], weights: Tensor) -> Tensor:
    total = TreeSum[Tensor]()
    for delta, weight in zip(deltas, (weights / weights.sum()).tolist(), strict=True):
        total.add(delta * weight)
    return total.result()


def usual_norm(deltas: Sequence[Tensor], quantile: float) -> float:
    """A quantile of the norms; of two that it lies between, the lower one."""
    lengths = torch.cat([norms(delta) for delta in deltas]).double()
    return float(torch.quantile(lengths, quantile, interpolation="lower"))


def _blocks(deltas: Sequence[Tensor]) -> Iterator[Tensor]:
    """The updates in blocks of coordinates, one row per client."""
    columns = max(1, BLOCK // len(deltas))
    for low in range(0, deltas[0].numel(), columns):
        yield torch.stack([delta[low : low + columns] for delta in deltas])


def _middle(deltas: Sequence[Tensor], cut: int) -> Tensor:
    """The mean of every coordinate without its `cut` lowest and highest values."""
    return torch.cat([block.sort(dim=0).values[cut : len(deltas) - cut].mean(0) for block in _blocks(deltas)])


def _closest(part: Part, updates: list[Update], attackers: int, keep: int) -> list[Update]:
    """The `keep` updates with the least sums of squared distances to their neighbours, in order of arrival."""
    _require_majority(part, attackers, len(updates))
    near = max(1, len(updates) - attackers - 2)
    scores = squared_distances([update.delta for update in updates]).sort(dim=1).values[:, 1 : 1 + near].sum(1)
    return [updates[i] for i in sorted(scores.argsort(stable=True)[:keep].tolist())]


def squared_distances(deltas: Sequence[Tensor]) -> Tensor:
    """‖Δ_i − Δ_j‖² by differences: products would lose small distances next to large ones."""
    pairs = torch.stack([torch.pdist(block.double()).square_() for block in _blocks(deltas)]).sum(0)
    squared = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    rows, columns = torch.triu_indices(len(deltas), len(deltas), offset=1)
    squared[rows, columns] = squared[columns, rows] = pairs
    return squared


def _require_majority(part: Part, attackers: int, participants: float) -> None:
    enough = attackers == 0 or participants > 2 * attackers + 2
    need = f"attackers={attackers} needs {2 * attackers + 3} participants or more"
    require_enough(part, enough, f"{need}, but a round has {participants}: raise participation or lower attackers")


def require_enough(part: Part, enough: bool, message: str) -> None:
    """Raise a `TooFewError` that names the part unless there are enough updates."""
    if not enough:
        raise TooFewError(f"{part.name}: {message}")


def _check_asked(part: Part, setup: SetupView, attackers: int) -> None:
    """Refuse before the first round what every round would refuse."""
    law, value = sampling(setup.experiment.participation)
    if setup.sampled and law != "bernoulli":
        _require_majority(part, attackers, value if law == "uniform" else setup.clients)
