"""Clients on the nodes of a Ray cluster.

Workers are actors of one thread. The data is put once a node and read there without a copy, the broadcast once a
round; what is summed over the clients is added by the workers, along the tree of `TreeSum`, and only the sum comes to
this process; clients' states stay on the node where they were made, and come here when a checkpoint asks for them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from fedflat.backends.actor import Actor
from fedflat.backends.base import Broadcast, Chunk, Order
from fedflat.backends.cluster import Session
from fedflat.backends.crew import Call, Crew, Worker
from fedflat.backends.parcels import pack, unpack
from fedflat.backends.remote import LOST, Kept, RemoteShares
from fedflat.errors import InputError, RunError
from fedflat.method import State, Update
from fedflat.scoring import Score
from fedflat.task import Task

LOOK = 16  # orders for each worker that are looked at before any is given out


class Ray:
    """Workers on as many nodes as the cluster has. The result does not depend on how many there are, or die.

    address: of the cluster; see `Session`. The workers are `Experiment.workers`, else one for each of its CPUs.
    """

    def __init__(self, task: Task, address: str | None = None) -> None:
        self.task, self._session = task, Session(address, task.experiment.workers)
        self._actors = ray.remote(Actor).options(num_cpus=1, scheduling_strategy="SPREAD")
        try:
            self._task = _put(replace(task, federation=None), "model, method or loss")  # type: ignore[arg-type]
            self._data = _put(task.federation, "data")
            self._crew = Crew(task.experiment.workers or self._session.cpus, self._hire)
        except BaseException:
            self._session.close()
            raise

    def _hire(self) -> Worker:
        actor, path = self._actors.remote(), [str(Path(entry).absolute()) for entry in sys.path]
        return Worker(actor, actor.prepare.remote(path, self._task, self._data))

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """See `Backend.visit`."""
        sheet, under_way = ray.put(pack(broadcast)), deque[list[Order]]()

        def calls() -> Iterator[Call]:
            for block in cut(orders, self._crew.count, self._size):
                under_way.append(block)
                yield self._call(sheet, block)

        for call in self._crew.run(calls()):
            yield from self._updates(sheet, under_way.popleft(), call)

    def _size(self, order: Order) -> int:
        return self.task.federation.size(order.client)

    def _call(self, sheet: Any, block: list[Order]) -> Call:
        """Have one worker visit the clients of a block."""
        orders = pack([replace(order, states={}) for order in block])

        def send(actor: Any) -> list[Any]:
            states = [_sendable(order.states) for order in block]
            refs: list[Any] = actor.visit.options(num_returns=2 + len(block)).remote(sheet, orders, *states)
            return refs

        what = "clients " + ", ".join(str(order.client) for order in block)
        needs = [order.states for order in block if isinstance(order.states, Kept)]
        return Call(what, send, sum(map(self._size, block)), needs)

    def _updates(self, sheet: Any, block: list[Order], call: Call) -> Iterator[Update]:
        """What a worker has replied; the sum of the block's shares goes with its first update."""
        updates, sizes, summed = unpack(call.reply, own=True)
        shares = None
        if summed:
            shares = RemoteShares(self._session, call.refs[1], partial(self._again, sheet, block, 1), call.actor)
        for update, order, ref, size in zip(updates, block, call.refs[2:], sizes, strict=True):
            kept = Kept(self._session, ref, partial(self._again, sheet, [order], 2), size) if size else {}
            yield replace(update, shares=shares, states=kept)
            shares = None

    def _again(self, sheet: Any, block: list[Order], place: int) -> Any:
        """Have the clients of a block visited again, and fetch what is at this place of the result."""
        if not self._session.open:
            raise RunError("what clients have kept since the last checkpoint went with the Ray cluster")
        (call,) = self._crew.run(iter([self._call(sheet, block)]))
        try:
            return unpack(ray.get(call.refs[place]), own=True)
        except LOST:
            return self._again(sheet, block, place)

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        sheet = ray.put(pack(broadcast))

        def send(chunk: Chunk, actor: Any) -> list[Any]:
            return [actor.score.remote(sheet, chunk)]

        calls = (Call(f"the evaluation of {chunk}", partial(send, chunk)) for chunk in chunks)
        return [call.reply for call in self._crew.run(calls)]

    def close(self) -> None:
        """See `Backend.close`."""
        self._crew.close()
        self._session.close()


def cut(orders: Iterable[Order], workers: int, size: Callable[[Order], int]) -> Iterator[list[Order]]:
    """Cut orders into blocks of a power of two, at places that it divides: whoever adds a block, the tree is the same.

    A block has no more than a worker's share of what is to come, so that all finish together.
    """
    waiting, place = ((order, size(order)) for order in orders), 0
    ahead = deque(islice(waiting, LOOK * workers))
    left = _amount(ahead)
    while ahead:
        count = 1
        while 2 * count <= len(ahead) and place % (2 * count) == 0 and _amount(ahead, 2 * count) * workers <= left:
            count *= 2
        block = [ahead.popleft() for _ in range(count)]
        yield [order for order, _ in block]
        more = list(islice(waiting, count))
        ahead.extend(more)
        left += _amount(more) - _amount(block)
        place += count


def _amount(sized: Iterable[tuple[Order, int]], count: int | None = None) -> int:
    """The size of the first so many of them, or of all."""
    return sum(size for _, size in islice(sized, count))


def _put(value: Any, what: str) -> Any:
    try:
        return ray.put(pack(value))
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InputError(f"the {what} cannot be sent to another process, as backend='ray' must: {error}") from error
    except ray.exceptions.ObjectStoreFullError as error:
        raise InputError(f"the {what} is too large for the Ray cluster's shared memory: {error}") from None


def _sendable(states: Mapping[str, State]) -> Any:
    """A client's states as an actor takes them: where they are, or packed."""
    if isinstance(states, Kept):
        return states.ref
    return pack(dict(states)) if states else None
