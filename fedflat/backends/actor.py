"""What a worker in a Ray cluster does. Everything it takes and gives is packed; errors are given, not raised."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedflat.backends.base import Chunk, load, portable, score_chunk
from fedflat.backends.parcels import Parcel, pack, unpack, weight
from fedflat.backends.pool import keep_pages
from fedflat.duties import perform
from fedflat.errors import FedflatError
from fedflat.method import State, Update
from fedflat.scoring import Score
from fedflat.sums import Shares, TreeSum
from fedflat.task import Task


class Actor:
    """One process with one compute thread, which holds the task for the whole run."""

    task: Task

    def prepare(self, path: Sequence[str], task: Parcel, data: Parcel) -> FedflatError | None:
        """Take the task up; the data stays in the node's shared memory. path: where modules are found as well."""
        torch.set_num_threads(1)
        keep_pages()
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            self.task = unpack(task, own=True)
            self.task.federation = unpack(data)
        except Exception as error:  # a class of the user's that is not on this node, for one
            return portable(error, "unpacking model, method and data")
        gc.freeze()
        return None

    def visit(self, sheet: Parcel, orders: Parcel, *states: Parcel | None) -> tuple[Any, ...]:
        """Have clients do their duties.

        Gives the updates without shares and states, the bytes of the states and whether there are shares; the sum of
        the shares; the states.
        """
        total: TreeSum[Shares] = TreeSum()
        updates, kept = list[Update](), list[Parcel | None]()
        try:
            broadcast = unpack(sheet)
            for order, own in zip(unpack(orders), states, strict=True):
                update = perform(self.task, order.job(broadcast, {} if own is None else unpack(own, own=True)))
                total.add(update.shares)
                lasting = _lasting(update)
                kept.append(pack(lasting) if lasting else None)
                updates.append(replace(update, shares=None, states={}))
            reply = updates, [weight(parcel) if parcel else 0 for parcel in kept], bool(total)
            return pack(reply), pack(total.result()) if total else None, *kept
        except Exception as error:
            return portable(error, "visit"), *[None] * (1 + len(states))

    def score(self, sheet: Parcel, chunk: Chunk) -> Score | FedflatError:
        """Score the broadcast weights on a chunk."""
        try:
            load(self.task, unpack(sheet))
            return score_chunk(self.task, chunk)
        except Exception as error:
            return portable(error, "score")

    def add(self, left: Parcel, right: Parcel) -> Parcel:
        """The sum of two clients' or workers' shares."""
        return pack(unpack(left, own=True).add_(unpack(right)))


def _lasting(update: Update) -> dict[str, State]:
    """What there is to keep of a client's states."""
    return {part: state for part, state in update.states.items() if state and update.failure is None}
