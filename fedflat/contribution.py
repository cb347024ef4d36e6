"""What of a client's update counts only in sum: whoever runs the client may add it to that of others."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedflat.method import Update, copied
from fedflat.sums import Terms
from fedflat.task import Task

DELTA, BUFFERS = "delta", "buffers"
"""Names of the sums of updates, by their weights, and of statistics, by samples; a part's are called `part/name`."""


def contribution(task: Task, update: Update) -> Update:
    """What a trained update adds to the sums of the round; the update itself only if a part combines updates."""
    if update.failure is not None:
        return _light(update)
    shares = _statistics(update)
    shares |= {f"{part}/{name}": t.clone() for part, state in update.sent.items() for name, t in state.items()}
    sent = [update.sent.get(part.name, {}) for part in task.method.parts if not part.bookkeeping]
    told = replace(update, norm=update.delta.norm().item(), floats=task.floats(sent), shares=shares)
    if task.method.filling("combine"):
        return replace(_light(told), delta=update.delta, sent=copied(update.sent))
    shares[DELTA] = update.delta * update.weight
    return _light(told)


def contributed_statistics(task: Task, update: Update) -> Update:
    """What estimated statistics of BatchNorm add to their sum."""
    return replace(_light(update), shares=_statistics(update))


def _statistics(update: Update) -> Terms:
    return Terms({BUFFERS: update.buffers.double() * update.samples} if update.buffers.numel() else {})


def _light(update: Update) -> Update:
    """The update without what counts only in sum."""
    return replace(update, delta=torch.empty(0), buffers=torch.empty(0), sent={})
