"""Clients on other machines, reached through Flower's grid: the back end of `server_app`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message, RecordDict

from fedflat.backends.base import Broadcast, Chunk, Order
from fedflat.backends.serial import Serial
from fedflat.duties import DUTIES
from fedflat.errors import InputError, RunError
from fedflat.flower.letters import EXAMINED, Errand, common, failed, kept_of, read_reply, request
from fedflat.flower.post import Post, pauses
from fedflat.flower.rehearsal import Expected, rehearse
from fedflat.flower.roll import Roll
from fedflat.flower.wire import RefusedError, form_of
from fedflat.method import Update
from fedflat.scoring import Score
from fedflat.task import Task

log = logging.getLogger(__name__)
KINDS = {"train": "train", "examine": "evaluate", "statistics": "query.statistics"}
"""Flower's types of message by duty."""


class Flower:
    """Has the clients of a roll train where they are. timeout: seconds in which a client must answer.

    Clients send what they computed; all that is summed is weighted and summed here, so that nobody can claim a weight.
    """

    def __init__(self, task: Task, roll: Roll, timeout: float) -> None:
        _refuse_simulations(task)
        task.deployed = True
        self.task, self.roll, self.timeout = task, roll, timeout
        self._post, self._here = Post(roll.grid), Serial(task)
        self._expected: dict[str, Expected] = {"examine": Expected(EXAMINED)}

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """See `Backend.visit`. Of clients that are asked for something else than training, only answers are told."""
        asked = [order for order in orders if order.duty != "examine" or self.roll.facts[order.client].tests]
        if not asked:
            return
        duty, heard = asked[0].duty, 0
        self._learn(broadcast, asked[0])
        self._await_one(asked)
        shared = common(broadcast)
        sent = [self._send(broadcast, shared, order) for order in asked]
        end = time.monotonic() + self.timeout
        for order, (errand, identity) in zip(asked, sent, strict=True):
            update = self._update(broadcast, order, errand, self._answer(identity, end))
            heard += update.failure is None
            if duty == "train" or update.failure is None:
                yield DUTIES[duty].share(self.task, update)
            else:
                log.warning("round %d: client %d is left out: %s", broadcast.round, order.client, update.failure)
        if duty == "statistics" and not heard:
            raise RunError("no client could be heard that was asked for statistics of BatchNorm")

    def _learn(self, broadcast: Broadcast, order: Order) -> None:
        """Find out what may come back."""
        if order.duty == "statistics":
            vectors = {"buffers": broadcast.buffers, "counters": broadcast.counters}
            self._expected[order.duty] = Expected(form_of({name: v for name, v in vectors.items() if v.numel()}))
        elif order.duty not in self._expected:
            self._expected[order.duty] = rehearse(self.task, broadcast, order, self.roll.facts[order.client])

    def _await_one(self, asked: Sequence[Order]) -> None:
        """Wait until one of the clients is there at least; not for ever."""
        end = time.monotonic() + self.timeout
        for _ in pauses():
            self.roll.refresh()
            if any(order.client in self.roll.nodes for order in asked) or time.monotonic() > end:
                return

    def _send(self, broadcast: Broadcast, shared: ArrayRecord, order: Order) -> tuple[Errand, str | None]:
        task, client = self.task, order.client
        errand = Errand(
            self.roll.run,
            broadcast.round,
            client,
            order.duty,
            float(broadcast.lr),
            task.share(client),
            task.federation.classes if self.roll.facts[client].classes else 0,
            kept_of(order.states),
        )
        if client not in self.roll.nodes:
            return errand, None
        content = request(errand, shared, order)
        group = str(broadcast.round)
        kind, valid = KINDS[order.duty], 2 * self.timeout  # answers wait for those that come before them in the order
        return errand, self._post.push(Message(content, self.roll.nodes[client], kind, ttl=valid, group_id=group))

    def _answer(self, identity: str | None, end: float) -> RecordDict | RefusedError:
        if identity is None:
            return RefusedError("is not there")
        for _ in pauses():
            late, answer = time.monotonic() > end, self._post.pull(identity)
            if answer is not None:
                return answer
            if late:
                break
        return RefusedError(f"has not answered within {self.timeout:g} s")

    def _update(self, broadcast: Broadcast, order: Order, errand: Errand, answer: RecordDict | RefusedError) -> Update:
        """What was answered, with the counts and weights that are known here."""
        expected, facts = self._expected[order.duty], self.roll.facts[order.client]
        try:
            if isinstance(answer, RefusedError):
                raise answer
            update = read_reply(answer, errand, expected.form, expected.figures, broadcast.buffers)
        except RefusedError as error:
            return failed(order.client, f"it {error}")
        samples = facts.tests if order.duty == "examine" else facts.samples
        return replace(update, samples=samples, weight=order.weight)

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`; the common test set is here."""
        return self._here.evaluate(broadcast, chunks)

    def close(self) -> None:
        """Nothing to release: the grid is Flower's."""


def _refuse_simulations(task: Task) -> None:
    for part in task.method.parts:
        if part.bookkeeping:
            raise InputError(
                f"{part.name} keeps books that only a simulation can keep, and cannot be deployed: choose another "
                "`evaluated` than 'all', or another method"
            )
