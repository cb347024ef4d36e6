"""What updates add to the sums of a round.

Most tensors of an update are only summed. They are its `terms`: a worker may add those of several clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedflat.core.rows import norms
from fedflat.core.sums import Terms, TreeSum, sum_of_rows
from fedflat.core.tensors import State, States
from fedflat.core.views import EMPTY, Update
from fedflat.engine.setup import Setup

DELTA, BUFFERS = "delta", "buffers"
"""Terms: updates weighted by `Update.weight`, statistics weighted by samples. Those of a part are `part/name`."""


def training_terms(setup: Setup, updates: Sequence[Update]) -> None:
    """Put the sum of the terms of updates into the first of them; their other tensors, which it replaces, are dropped.

    `delta` and `sent` are kept if a part regroups or combines updates.
    """
    usable, whole = [update for update in updates if update.failure is None], _kept_whole(setup)
    if usable:
        nothing = torch.full_like(usable[0].delta, -0.0) if len(usable) < len(updates) else EMPTY
        rows = _stacked([nothing if update.failure else update.delta for update in updates])
        for update, norm in zip(updates, norms(rows).flatten().tolist(), strict=True):
            update.norm = norm
        floats = _floats(setup, {})
        for update in usable:
            update.floats = _floats(setup, update.sent) if update.sent else floats
        others = any(update.sent or update.buffers.numel() for update in usable)
        updates[0].terms = terms = _other_terms(updates) if others else Terms()
        if not whole:
            terms[DELTA] = sum_of_rows(rows * rows.new_tensor([[update.weight] for update in updates]))
    for update in updates:
        update.buffers = EMPTY
        if update.failure is not None or not whole:
            update.delta, update.sent = EMPTY, {}


def _stacked(rows: list[Tensor]) -> Tensor:
    """Vectors as the rows of a matrix; one alone, which may be long, is not copied."""
    return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)


def _other_terms(updates: Sequence[Update]) -> Terms:
    """The sums of all terms but `DELTA`."""
    total = TreeSum[Terms]()
    for update in updates:
        total.add(None if update.failure is not None else _own_terms(update))
    return total.result()


def _own_terms(update: Update) -> Terms:
    sent = ((f"{part}/{name}", t) for part, state in update.sent.items() for name, t in state.items())
    terms = Terms({name: tensor.unsqueeze(0).sum(0) for name, tensor in sent})
    if update.buffers.numel():
        terms[BUFFERS] = update.buffers.double() * update.samples
    return terms


def stacked_terms(setup: Setup, updates: list[Update], delta: Tensor, buffers: Tensor, sent: States) -> list[Update]:
    """The updates of several clients as `training_terms` gives them. The first one has the sum of their terms.

    Args:
        setup: The setup of the run.
        updates: The updates.
        delta, buffers, sent: Their tensors of these names, with one row per update.
    """
    usable, places = updates, [i for i, update in enumerate(updates) if update.failure is None]
    if not places:
        return updates
    if len(places) < len(updates):
        usable, delta, buffers = [updates[i] for i in places], delta[places], buffers[places]
        sent = {part: {name: t[places] for name, t in state.items()} for part, state in sent.items()}
    floats = _floats(setup, next(each_row(sent, 1)))
    for update, norm in zip(usable, norms(delta).flatten().tolist(), strict=True):
        update.norm, update.floats = norm, floats
    updates[0].terms = terms = Terms({f"{part}/{n}": t.sum(0) for part, s in sent.items() for n, t in s.items()})
    if buffers.numel():
        buffers = buffers.double()
        terms[BUFFERS] = buffers.new_tensor([update.samples for update in usable]) @ buffers
    if _kept_whole(setup):
        for update, row, own in zip(usable, delta, each_row(sent, len(usable)), strict=True):
            update.delta, update.sent = row, own
    else:
        terms[DELTA] = delta.new_tensor([update.weight for update in usable]) @ delta
    return updates


def _kept_whole(setup: Setup) -> bool:
    """Whether a part needs the updates of single clients."""
    return bool(setup.method.filling("combine") or setup.method.filling("regroup"))


def _floats(setup: Setup, sent: Mapping[str, State]) -> int:
    """How many numbers a client sends."""
    return setup.floats([sent.get(part.name, {}) for part in setup.parts if not part.simulation_only] if sent else ())


def each_row(states: Mapping[str, Mapping[str, Tensor]], count: int) -> Iterator[States]:
    """The states of so many clients one by one, from tensors with one row per client."""
    for i in range(count):
        yield {part: {name: tensor[i] for name, tensor in state.items()} for part, state in states.items()}


def estimated_terms(setup: Setup, updates: Sequence[Update]) -> None:
    """`training_terms` of clients that have estimated BatchNorm's statistics."""
    updates[0].terms = _other_terms(updates) if any(update.failure is None for update in updates) else None
    for update in updates:
        update.buffers = EMPTY
