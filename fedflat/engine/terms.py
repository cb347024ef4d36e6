"""What updates add to the sums of a round.

Most tensors of an update are only summed. They are its terms: a worker may add those of several clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.rows import norms
from fedflat.core.sums import Terms, TreeSum, sum_of_rows
from fedflat.core.tensors import State, States
from fedflat.core.views import EMPTY, Update
from fedflat.engine.setup import Setup

DELTA, BUFFERS = "delta", "buffers"
"""Terms: updates weighted by `Update.weight`, statistics weighted by samples. Those of a part are `part/name`."""


def training_terms(setup: Setup, updates: Sequence[Update]) -> Terms | None:
    """The sum of the terms of updates; their other tensors, which it replaces, are dropped.

    `delta` and `sent` are kept if a part regroups or combines updates.
    """
    usable, whole, terms = [update for update in updates if update.failure is None], _kept_whole(setup), None
    if usable:
        nothing = torch.full_like(usable[0].delta, -0.0) if len(usable) < len(updates) else EMPTY
        rows = _stacked([nothing if update.failure else update.delta for update in updates])
        for update, norm in zip(updates, norms(rows).flatten().tolist(), strict=True):
            update.norm = norm
        floats = _floats(setup, {})
        for update in usable:
            update.floats = _floats(setup, update.sent) if update.sent else floats
        others = any(update.sent or update.buffers.numel() for update in usable)
        terms = _other_terms(updates) if others else Terms()
        if not whole:
            terms[DELTA] = sum_of_rows(rows * rows.new_tensor([[update.weight] for update in updates]))
    for update in updates:
        update.buffers = EMPTY
        if update.failure is not None or not whole:
            update.delta, update.sent = EMPTY, {}
    return terms


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


def stacked_terms(
    setup: Setup, numbers: np.ndarray, failures: Mapping[int, str], delta: Tensor, buffers: Tensor, sent: States
) -> tuple[Terms | None, dict[int, dict[str, Any]]]:
    """What `training_terms` says of the clients of a stack: the sum of their terms, and what else they send by place.

    Args:
        setup: The setup of the run.
        numbers: The clients' numbers; those that say what is sent are set here.
        failures: See `Updates`.
        delta, buffers, sent: Their tensors of these names, with one row per client.
    """
    places = np.delete(np.arange(len(numbers)), list(failures))
    if not len(places):
        return None, {}
    if failures:
        chosen = torch.from_numpy(places)
        delta, buffers = delta[chosen], buffers[chosen]
        sent = {part: {name: t[chosen] for name, t in state.items()} for part, state in sent.items()}
    numbers["norm"][places] = norms(delta).flatten().numpy()
    numbers["floats"][places] = _floats(setup, next(each_row(sent, 1)))
    terms = Terms({f"{part}/{n}": t.sum(0) for part, s in sent.items() for n, t in s.items()})
    if buffers.numel():
        buffers = buffers.double()
        terms[BUFFERS] = _like(buffers, numbers["samples"][places]) @ buffers
    if _kept_whole(setup):
        rows = zip(places.tolist(), delta, each_row(sent, len(places)), strict=True)
        return terms, {place: {"delta": row, "sent": own} for place, row, own in rows}
    terms[DELTA] = _like(delta, numbers["weight"][places]) @ delta
    return terms, {}


def _like(tensor: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(tensor.dtype)


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


def estimated_terms(setup: Setup, updates: Sequence[Update]) -> Terms | None:
    """`training_terms` of clients that have estimated BatchNorm's statistics."""
    terms = _other_terms(updates) if any(update.failure is None for update in updates) else None
    for update in updates:
        update.buffers = EMPTY
    return terms
