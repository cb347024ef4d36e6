"""Worker processes on this machine, one compute thread each.

The workers are forked once and inherit model, method and data. Weights, updates and client states go through shared
memory, and only a few small numbers through pipes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from fedflat.core.forked import ForkedWorker, can_fork, wait_for
from fedflat.core.scheduler import AHEAD, Call, Scheduler
from fedflat.core.scores import Score
from fedflat.core.shared_memory import Contents, SharedTensors
from fedflat.core.sums import Terms
from fedflat.core.tensors import copied, flatten, nest
from fedflat.core.updates import NUMBERS, Updates
from fedflat.engine.evaluation import score_chunk
from fedflat.engine.jobs import named, run_jobs
from fedflat.engine.placement import placed, processes
from fedflat.engine.setup import Broadcast, Chunk, Jobs, Setup
from fedflat.errors import InputError, RunError

OWN = ""  # beside the names of parts: the weights that only this client receives
SHARES = 4  # blocks per worker, at least: with fewer, one worker may end a round alone
VECTORS = ("delta", "buffers", "counters")


class Slot:
    """Shared memory for one running job: the client's states and its update."""

    def __init__(self) -> None:
        self.states, self.update = SharedTensors(), SharedTensors()


class Pool:
    """Persistent forked workers. The result does not depend on how many there are, or on how many die."""

    def __init__(self, setup: Setup) -> None:
        if not can_fork():
            raise InputError("the pool needs to fork processes, which this system cannot: use backend='serial'")
        count = processes(setup)
        shared, slots = SharedTensors(), [Slot() for _ in range(AHEAD * count + 1)]
        self._setup, self._count, self._broadcast, self._slots = setup, count, shared, slots

        def start(place: int) -> ForkedWorker:
            here = cache(partial(placed, setup, setup.devices[place % len(setup.devices)]))  # made in the worker
            return ForkedWorker(lambda request: _answer(here(), shared, slots, request))

        self._scheduler = Scheduler(count, start, wait_for, limit=len(self._slots))

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """See `Backend.run`."""
        sent, free = self._write(broadcast), deque(range(len(self._slots)))

        def calls() -> Iterator[Call]:
            for block in self._blocks(jobs):
                slot = free.popleft()
                states = self._slots[slot].states.write(_packed_jobs(block))
                what = partial(_described, block, broadcast.round)
                yield Call(what, ("run", sent, slot, (block.kind, block.clients, block.weights), states))

        for call in self._run(calls()):
            slot, plain, contents = call.reply
            yield _unpacked(self._slots[slot].update.read(contents), *plain)
            free.append(slot)

    def _blocks(self, jobs: Jobs) -> Iterator[Jobs]:
        """The jobs that travel together: a stack of clients, or so many small ones that every worker gets its share."""
        size, share = self._setup.block, 1
        if self._setup.stack > 1 or size == 1:
            return jobs.blocks(size)
        while 2 * share * SHARES * self._count <= len(jobs):
            share *= 2
        return jobs.blocks(min(share, size))

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        sent = self._write(broadcast)
        return [call.reply for call in self._run(Call(partial(str, chunk), ("score", sent, chunk)) for chunk in chunks)]

    def _write(self, broadcast: Broadcast) -> tuple[int, float, Contents]:
        tensors = {"theta": broadcast.theta, "buffers": broadcast.buffers, "counters": broadcast.counters}
        contents = self._broadcast.write(tensors | flatten({"received": broadcast.received}))
        return broadcast.round, broadcast.lr, contents

    def _run(self, calls: Iterator[Call]) -> Iterator[Call]:
        if self._scheduler.busy:
            raise RunError("the pool is still busy with an earlier call, whose results were not all taken")
        return self._scheduler.run(calls)

    def close(self) -> None:
        """End the workers; busy ones are killed."""
        self._scheduler.close()
        for memory in (self._broadcast, *(m for slot in self._slots for m in (slot.states, slot.update))):
            memory.close()
        self._slots = []


def _described(block: Jobs, round: int) -> str:
    return f"{named(block)} in round {round}"


# ---- inside a worker ----


def _answer(setup: Setup, shared: SharedTensors, slots: list[Slot], request: Any) -> Any:
    """Do what one request asks for."""
    kind, (round, lr, contents), *rest = request
    tensors = shared.read(contents)
    sent = {name: tensors.pop(name) for name in ("theta", "buffers", "counters")}
    broadcast = Broadcast(round, lr, **sent, received=nest(tensors, 3).get("received", {}))
    if kind == "score":
        setup.load(broadcast)
        return score_chunk(setup, rest[0])
    slot, plain, states = rest
    jobs = _unpacked_jobs(plain, slots[slot].states.read(states))
    updates = run_jobs(setup, broadcast, jobs)
    metrics = {place: own["metrics"] for place, own in updates.own.items() if "metrics" in own}
    contents = slots[slot].update.write(_packed(updates))
    return slot, (updates.numbers.tobytes(), updates.failures, metrics, updates.terms is not None), contents


# ---- what is in shared memory: tensors by joined names, those of a client after its position in the block ----


def _packed_jobs(block: Jobs) -> dict[str, Tensor]:
    """The tensors of jobs."""
    if block.plain:
        return {}
    own = {str(i): {OWN: {"theta": job.theta}} for i, job in enumerate(block) if job.theta is not None}
    return flatten({str(i): {**own.get(str(i), {}), **job.states} for i, job in enumerate(block) if own or job.states})


def _unpacked_jobs(plain: tuple[str, list[int], list[float]], tensors: dict[str, Tensor]) -> Jobs:
    """The inverse of `_packed_jobs`; the tensors are views."""
    jobs = Jobs(*plain)
    if not tensors:
        return jobs
    nested, found = nest(tensors, 3), []
    for place, job in enumerate(jobs):
        states = nested.get(str(place), {})
        theta = states.pop(OWN, {}).get("theta")
        found.append(replace(job, states=states, theta=theta))
    return Jobs.of(found)


def _packed(updates: Updates) -> dict[str, Tensor]:
    """The tensors of updates, and the sum of their terms."""
    own = {str(place): {n: v for n, v in own.items() if n != "metrics"} for place, own in updates.own.items()}
    return flatten({"terms": {} if updates.terms is None else updates.terms.here()} | own)


def _unpacked(
    packed: dict[str, Tensor],
    numbers: bytes,
    failures: dict[int, str],
    metrics: dict[int, dict[str, float]],
    has_terms: bool,
) -> Updates:
    """The inverse of `_packed`, with copies of all but the states, which the store copies itself."""
    nested: dict[str, Any] = nest(packed, 2)
    terms = Terms({name: tensor.clone() for name, tensor in nested.pop("terms", {}).items()})
    own: dict[int, dict[str, Any]] = {place: {"metrics": values} for place, values in metrics.items()}
    for place, tensors in nested.items():
        mine = own.setdefault(int(place), {})
        mine |= {name: tensors.pop(name).clone() for name in VECTORS if name in tensors}
        kept = nest(tensors, 3)
        mine |= {"sent": copied(kept.get("sent", {})), "states": kept.get("states", {})}
    return Updates(np.frombuffer(numbers, NUMBERS), failures, own, terms if has_terms else None)
