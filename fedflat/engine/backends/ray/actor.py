"""A worker in a Ray cluster. Its arguments and results are packed; it returns errors instead of raising them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedflat.core.devices import resolve
from fedflat.core.forked import portable
from fedflat.core.processes import keep_pages
from fedflat.core.scores import Score
from fedflat.core.sums import Summable, TreeSum
from fedflat.core.tensors import State, copied
from fedflat.core.views import Update
from fedflat.engine.backends.ray.serialization import Packed, pack, packed_bytes, unpack
from fedflat.engine.evaluation import score_chunk
from fedflat.engine.jobs import run_jobs
from fedflat.engine.placement import placed
from fedflat.engine.setup import Chunk, Jobs, Setup
from fedflat.errors import FedflatError


class Actor:
    """One process with one compute thread that holds the setup for the whole run."""

    setup: Setup

    def prepare(self, path: Sequence[str], setup: Packed, data: Packed) -> FedflatError | None:
        """Load the setup; the data stay in the node's shared memory. `path` is added to the module search path."""
        torch.set_num_threads(1)
        keep_pages()
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            self.setup = unpack(setup, own=True)
            self.setup.federation = unpack(data)
            kind = self.setup.devices[0].type  # Ray shows an actor its own GPU only, as number 0
            self.setup = placed(self.setup, resolve(kind)[0])
        except Exception as error:  # for example, a user's class is missing on this node
            return portable(error)
        gc.freeze()
        return None

    def run(self, broadcast: Packed, jobs: Packed, *states: Packed | None) -> tuple[Any, ...]:
        """Do jobs.

        Returns:
            A pack of the updates without terms and states, the states' sizes in bytes and whether there are terms; then
            the sum of the terms; then the states.
        """
        total: TreeSum[Summable] = TreeSum()
        updates, kept = list[Update](), list[Packed | None]()
        try:
            sent = unpack(broadcast)
            given = zip(unpack(jobs), states, strict=True)
            known = [replace(job, states={} if own is None else unpack(own, own=True)) for job, own in given]
            for block in Jobs.of(known).blocks(self.setup.stack):
                made = run_jobs(self.setup, sent, block)
                total.add(made.terms, len(made))
                for update in made:
                    lasting = _lasting(update)
                    kept.append(pack(copied(lasting)) if lasting else None)  # a row of a stack without the others
                    updates.append(replace(update, states={}))
            reply = updates, [packed_bytes(packed) if packed else 0 for packed in kept], bool(total)
            return pack(reply), pack(total.result()) if total else None, *kept
        except Exception as error:
            return portable(error), *[None] * (1 + len(states))

    def score(self, broadcast: Packed, chunk: Chunk) -> Score | FedflatError:
        """Score the broadcast weights on a chunk."""
        try:
            self.setup.load(unpack(broadcast))
            return score_chunk(self.setup, chunk)
        except Exception as error:
            return portable(error)

    def add(self, left: Packed, right: Packed) -> Packed:
        """The sum of two clients' or workers' terms."""
        return pack(unpack(left, own=True).add_(unpack(right)))


def _lasting(update: Update) -> dict[str, State]:
    """The client's states that must be kept."""
    return {part: state for part, state in update.states.items() if state and update.failure is None}
