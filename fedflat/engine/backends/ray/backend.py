"""Clients on the nodes of a Ray cluster.

Workers are actors with one thread. Each node receives the data once and the broadcast once per round, and reads them
without a copy. The workers add what is summed over the clients, along the tree of `TreeSum`, and only the sum comes to
this process. Clients' states stay on the node where they were made, until a checkpoint fetches them.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from fedflat.core.devices import CPU
from fedflat.core.scheduler import Call, Scheduler
from fedflat.core.scores import Score
from fedflat.core.tensors import State
from fedflat.core.updates import Updates
from fedflat.engine.backends.ray.actor import Actor
from fedflat.engine.backends.ray.cluster import Session
from fedflat.engine.backends.ray.remote import LOST, KeptStates, RemoteTerms
from fedflat.engine.backends.ray.serialization import pack, unpack
from fedflat.engine.backends.ray.workers import PATIENCE, RayWorker, Request, wait_for
from fedflat.engine.jobs import named
from fedflat.engine.setup import Broadcast, Chunk, Job, Jobs, Setup
from fedflat.errors import InputError, RunError

LOOK = 16  # jobs per worker that are read before the first is sent


def resources(workers: int | None, cpus: int, gpus: float | None) -> tuple[int, dict[str, float]]:
    """The number of workers and what each of them asks of the cluster.

    A worker on a GPU asks for a whole one, or for such a fraction that all workers fit: never for parts of several. Its
    share of a CPU is smaller where the cluster has fewer CPUs than workers.

    Args:
        workers: The number that the experiment wants; None: one per CPU, or one per GPU.
        cpus: CPUs of the cluster.
        gpus: GPUs of the cluster; None if clients train on CPUs.
    """
    if gpus is None:
        return workers or cpus, {"num_cpus": 1}
    if gpus < 1:
        raise InputError("the Ray cluster has no GPU: start nodes with `ray start --num-gpus`, or set device='cpu'")
    count = workers or int(gpus)
    return count, {"num_cpus": 1 / math.ceil(count / cpus), "num_gpus": 1 / math.ceil(count / int(gpus))}


class Ray:
    """Workers on the nodes of a cluster: `Experiment.workers`, or one per CPU of the cluster.

    The result does not depend on how many workers there are, or on how many die.

    Args:
        setup: The setup of the run.
        address: Address of the cluster; see `Session`.
    """

    def __init__(self, setup: Setup, address: str | None = None) -> None:
        self.setup, self._session = setup, Session(address, setup.experiment.workers)
        try:
            self._packed = _put(replace(setup, federation=None), "model, method or loss")  # type: ignore[arg-type]
            self._data = _put(setup.federation, "data")
            on_gpus, cpus, gpus = setup.devices[0] != CPU, self._session.cpus, self._session.gpus
            count, wanted = resources(setup.experiment.workers, cpus, gpus if on_gpus else None)
            self._actors = ray.remote(Actor).options(**wanted, scheduling_strategy="SPREAD")
            self._scheduler = Scheduler(count, self._start, wait_for, patience=PATIENCE)
        except BaseException:
            self._session.close()
            raise

    def _start(self, place: int) -> RayWorker:
        actor, path = self._actors.remote(), [str(Path(entry).absolute()) for entry in sys.path]
        return RayWorker(actor, actor.prepare.remote(path, self._packed, self._data))

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """See `Backend.run`."""
        sent, under_way = ray.put(pack(broadcast)), deque[list[Job]]()

        def calls() -> Iterator[Call]:
            for block in cut(jobs, len(self._scheduler.workers), self._size, self.setup.stack):
                under_way.append(block)
                yield self._call(sent, block)

        for call in self._scheduler.run(calls()):
            yield self._updates(sent, under_way.popleft(), call)

    def _size(self, job: Job) -> int:
        return self.setup.federation.size(job.client)

    def _call(self, broadcast: Any, block: list[Job]) -> Call:
        """The call that has one worker do the jobs of a block."""
        jobs = pack([replace(job, states={}) for job in block])

        def send(actor: Any) -> list[Any]:
            states = [_sendable(job.states) for job in block]
            refs: list[Any] = actor.run.options(num_returns=2 + len(block)).remote(broadcast, jobs, *states)
            return refs

        needs = [job.states for job in block if isinstance(job.states, KeptStates)]
        return Call(partial(named, Jobs.of(block)), Request(send, needs), sum(map(self._size, block)))

    def _updates(self, broadcast: Any, block: list[Job], call: Call) -> Updates:
        """The updates in a worker's reply."""
        updates, sizes, summed = unpack(call.reply, own=True)
        request, terms = call.request, None
        if summed:
            again = partial(self._again, broadcast, block, 1)
            terms = RemoteTerms(self._session, request.refs[1], again, request.actor)
        for i, (update, ref, size) in enumerate(zip(updates, request.refs[2:], sizes, strict=True)):
            again = partial(self._again, broadcast, [block[i]], 2)
            if self.setup.stack > 1:  # what was computed together must be computed together again
                again = partial(self._again, broadcast, block, 2 + i)
            update.states = KeptStates(self._session, ref, again, size) if size else {}
        return Updates.of(updates, terms)

    def _again(self, broadcast: Any, block: list[Job], place: int) -> Any:
        """Repeat the jobs of a block, and fetch the result at this position."""
        if not self._session.open:
            raise RunError("the clients' states since the last checkpoint were lost with the Ray cluster")
        (call,) = self._scheduler.run(iter([self._call(broadcast, block)]))
        try:
            return unpack(ray.get(call.request.refs[place]), own=True)
        except LOST:
            return self._again(broadcast, block, place)

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        sent = ray.put(pack(broadcast))

        def send(chunk: Chunk, actor: Any) -> list[Any]:
            return [actor.score.remote(sent, chunk)]

        calls = (Call(partial("the evaluation of {}".format, chunk), Request(partial(send, chunk))) for chunk in chunks)
        return [call.reply for call in self._scheduler.run(calls)]

    def close(self) -> None:
        """See `Backend.close`."""
        self._scheduler.close()
        self._session.close()


def cut(jobs: Iterable[Job], workers: int, size: Callable[[Job], int], stack: int = 1) -> Iterator[list[Job]]:
    """Cut jobs into aligned blocks of 2^k jobs, so that every block is a subtree of `TreeSum`.

    A block has at most 1/workers of the remaining work, so that all workers finish at about the same time; and whole
    stacks of clients: one, where their number is no power of two.
    """
    waiting, place = ((job, size(job)) for job in jobs), 0
    ahead = deque(islice(waiting, LOOK * workers * stack))
    left, grows = _amount(ahead), stack & (stack - 1) == 0
    while ahead:
        count = stack
        while (
            grows
            and 2 * count <= len(ahead)
            and place % (2 * count) == 0
            and _amount(ahead, 2 * count) * workers <= left
        ):
            count *= 2
        block = [ahead.popleft() for _ in range(min(count, len(ahead)))]
        yield [job for job, _ in block]
        more = list(islice(waiting, count))
        ahead.extend(more)
        left += _amount(more) - _amount(block)
        place += count


def _amount(sized: Iterable[tuple[Job, int]], count: int | None = None) -> int:
    """The total size of the first `count` jobs, or of all."""
    return sum(size for _, size in islice(sized, count))


def _put(value: Any, what: str) -> Any:
    try:
        return ray.put(pack(value))
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InputError(f"the {what} cannot be sent to another process, as backend='ray' must: {error}") from error
    except ray.exceptions.ObjectStoreFullError as error:
        raise InputError(f"the {what} is too large for the Ray cluster's shared memory: {error}") from None


def _sendable(states: Mapping[str, State]) -> Any:
    """A client's states as an argument of an actor: a reference, or packed."""
    if isinstance(states, KeptStates):
        return states.ref
    return pack(dict(states)) if states else None
