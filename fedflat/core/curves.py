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


FALLS = ("loss", "_std", "seconds", "error", "mse", "mae", "perplexity", "ece")  # endings of what should be small
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


WRITTEN = {
    "top5": "top-5 accuracy",
    "macro_f1": "macro F1",
    "auc": "AUC",
    "ece": "ECE",
    "miou": "mIoU",
    "iou": "IoU",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
}
"""How people write the metrics whose names are not plain words."""


def written(metric: str) -> str:
    """A metric as tables and titles write it, on whichever test set.

    >>> written("miou"), written("unseen_macro_f1"), written("balanced_accuracy")
    ('mIoU', 'unseen macro F1', 'balanced accuracy')
    """
    key = next((name for name in WRITTEN if f"_{metric}".endswith(f"_{name}")), "")
    if not key or metric.startswith(("clients_", "personal_")):  # whose top5 are the best 5 % of the clients
        return metric.replace("_", " ")
    return metric.removesuffix(key).replace("_", " ") + WRITTEN[key]


def titled(text: str) -> str:
    """Text with a capital letter in front, unless its first word has its own spelling.

    >>> titled("macro F1"), titled("mIoU")
    ('Macro F1', 'mIoU')
    """
    first = text.split(" ")[0]
    return text[:1].upper() + text[1:] if first == first.lower() else text
