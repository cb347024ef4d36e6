"""Regroup updates before a robust combination, so that it holds where clients' data differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.fields import Count, Natural
from fedflat.core.part import Part
from fedflat.core.views import Server, Update
from fedflat.parts.robust import require_enough, squared_distances


@dataclass(frozen=True)
class Bucketing(Part):
    """Replace updates by means of a few, drawn at random (Karimireddy et al., 2022).

    The means differ less than the updates do, so that a robust combination of them ignores fewer honest clients. Of n
    updates with f malicious ones it makes n/s with up to f. Keeps nothing; sends 1 down, 1 up.

    Args:
        s: The number of updates per bucket; 1 changes nothing.
    """

    formula: ClassVar[str] = "Δ_b = mean of the s updates of bucket b,  updates dealt out at random in every round"
    rank: ClassVar[int] = 91  # after attacks, which are made on the server
    uniform: ClassVar[bool] = True
    replaces_mean: ClassVar[bool] = True
    s: Count = 2

    def regroup(self, server: Server, updates: Iterable[Update]) -> Iterable[Update]:
        if self.s == 1:
            return updates
        received = sorted(updates, key=lambda update: update.client)  # the same buckets in whatever order they arrive
        order = streams.numpy_stream(server.experiment.seed, self.name, server.round).permutation(len(received))
        buckets = [[received[i] for i in order[k : k + self.s]] for k in range(0, len(received), self.s)]
        return [replace(bucket[0], delta=_mean([u.delta for u in bucket]), weight=1.0) for bucket in buckets]


@dataclass(frozen=True)
class NNM(Part):
    """Replace every update by the mean of its nearest neighbours (Allouah et al., 2023).

    Honest updates come closer to each other and to their mean, and an attacker's is mixed with honest ones.
    Keeps nothing; sends 1 down, 1 up.

    Args:
        attackers: f, the largest number of malicious participants per round; each mean leaves out the f furthest. 0
            puts the plain mean in place of every update.
    """

    formula: ClassVar[str] = "Δ_i ← mean of the |S| − f updates nearest to Δ_i,  itself included"
    rank: ClassVar[int] = 92  # after bucketing
    uniform: ClassVar[bool] = True
    replaces_mean: ClassVar[bool] = True
    attackers: Natural = 1

    def regroup(self, server: Server, updates: Iterable[Update]) -> Iterable[Update]:
        received = list(updates)
        keep = len(received) - self.attackers
        message = f"attackers={self.attackers} of {len(received)} updates leaves no majority: lower it"
        require_enough(self, keep > self.attackers or self.attackers == 0, message)
        deltas = [update.delta for update in received]
        nearest = squared_distances(deltas).argsort(dim=1, stable=True)[:, :keep]
        means = [_mean([deltas[j] for j in sorted(row)]) for row in nearest.tolist()]
        return [replace(update, delta=mean) for update, mean in zip(received, means, strict=True)]


def _mean(deltas: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(deltas)).mean(0)
