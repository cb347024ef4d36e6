"""Curves of a metric: pairs (round, value) in the order of the rounds."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

Points = Iterable[tuple[int, float]]


def round_reaching(points: Points, target: float) -> int | None:
    """The first round whose value reaches `target`; None if no round does."""
    return next((round for round, value in points if value >= target), None)


def tail_mean(points: Points, rounds: int, until: int) -> float | None:
    """The mean over the last `rounds` rounds up to and including round `until`; None without any value.

    >>> tail_mean([(1, 0.0), (5, 0.4), (6, 0.6)], rounds=2, until=6)
    0.5
    """
    values = [value for round, value in points if until - rounds < round <= until]
    return fmean(values) if values else None


FALLS = ("loss", "_std", "seconds", "rmse", "mae", "perplexity", "ece")  # endings of names of which less is better
SHARES = ("accuracy", "top5", "macro_f1", "auc", "miou", "ece")  # endings of the names of shares of 1


def falls(metric: str) -> bool:
    """Whether less of a metric is better."""
    return metric.endswith(FALLS)


def is_share(metric: str) -> bool:
    """Whether a metric is a share of 1, which tables show in percent.

    >>> is_share("unseen_accuracy"), is_share("iou_road"), is_share("loss")
    (True, True, False)
    """
    return metric.endswith(SHARES) or "iou" in metric.split("_")
