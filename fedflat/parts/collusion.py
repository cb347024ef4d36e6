"""Updates that malicious clients agree upon, knowing those of the honest ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEPS = 30  # halvings of the search for the largest deviation


def alie(honest: Tensor, scale: float) -> Tensor:
    """A little is enough (Baruch et al., 2019): as far from the mean as many honest ones, coordinate by coordinate."""
    return honest.mean(0) - scale * _spread(honest)


def ipm(honest: Tensor, scale: float) -> Tensor:
    """Inner product manipulation (Xie et al., 2020): against the honest mean."""
    return -scale * honest.mean(0)


def min_max(honest: Tensor, scale: float) -> Tensor:
    """No further from any honest update than two honest ones are from each other (Shejwalkar & Houmansadr, 2021)."""
    widest = torch.pdist(honest).max()
    return _deviating(honest, scale, lambda made: bool((honest - made).norm(dim=1).max() <= widest))


def min_sum(honest: Tensor, scale: float) -> Tensor:
    """No further from all honest updates together than the outermost honest one (ibid.)."""
    most = torch.cdist(honest, honest).square().sum(1).max()
    return _deviating(honest, scale, lambda made: bool((honest - made).square().sum() <= most))


def _deviating(honest: Tensor, scale: float, unnoticed: Callable[[Tensor], bool]) -> Tensor:
    """From the mean against the spread of the honest updates, as far as it goes unnoticed."""
    mean, direction = honest.mean(0), -_spread(honest)
    low, high = 0.0, 1.0
    while unnoticed(mean + high * direction) and high < 1e6:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if unnoticed(mean + middle * direction) else (low, middle)
    return mean + scale * low * direction


def _spread(honest: Tensor) -> Tensor:
    return honest.std(0, correction=0)


AGREED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alie": alie,
    "ipm": ipm,
    "min_max": min_max,
    "min_sum": min_sum,
}


def agreed(kind: str, honest: Sequence[Tensor], own: Sequence[Tensor], scale: float) -> Tensor:
    """What all malicious clients of a round send. With nobody honest there, they reverse their own mean."""
    if kind == "collude" or not honest:
        return -scale * torch.stack(list(own)).mean(0)
    return AGREED[kind](torch.stack(list(honest)).double(), scale).to(honest[0].dtype)
