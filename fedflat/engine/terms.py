"""What updates add to the sums of a round.

Most tensors of an update are only summed. They are its `terms`: a worker may add those of several clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedflat.core.rows import norms
from fedflat.core.sums import Terms
from fedflat.core.tensors import State, States
from fedflat.core.views import EMPTY, Update
from fedflat.engine.setup import Setup

DELTA, BUFFERS = "delta", "buffers"
"""Terms: updates weighted by `Update.weight`, statistics weighted by samples. Those of a part are `part/name`."""


def training_terms(setup: Setup, update: Update) -> Update:
    """The update with its terms; `delta` itself is kept only if a part regroups or combines updates."""
    delta, buffers, sent = update.delta, update.buffers, update.sent
    update.delta, update.buffers, update.sent = EMPTY, EMPTY, {}
    if update.failure is not None:
        return update
    update.norm, update.floats = norms(delta).item(), _floats(setup, sent)
    update.terms = terms = Terms(
        {f"{part}/{n}": t.unsqueeze(0).sum(0) for part, s in sent.items() for n, t in s.items()}
    )
    if buffers.numel():
        terms[BUFFERS] = buffers.double() * update.samples
    if _kept_whole(setup):
        update.delta, update.sent = delta, sent
    else:
        terms[DELTA] = delta * update.weight
    return update


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


def estimated_terms(setup: Setup, update: Update) -> Update:
    """The update of a client that has estimated BatchNorm's statistics, with its terms."""
    update.terms = Terms({BUFFERS: update.buffers.double() * update.samples} if update.buffers.numel() else {})
    update.buffers = EMPTY
    return update
