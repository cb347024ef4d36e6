"""Workers on the nodes of a Ray cluster, and calls handed out to them: a worker that dies has its calls done again."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from fedflat.backends.remote import Remote
from fedflat.errors import RunError

log = logging.getLogger(__name__)
AHEAD = 2  # calls a worker may hold: the next one is there when it finishes
PATIENCE = 120.0  # seconds to wait for a worker where there is none
TRIES = 3  # workers that may die of one call, or in a row before they have started


@dataclass(eq=False)
class Call:
    """Something to be done by whoever has time.

    what: for a person. send: asks an actor and gives the references of its reply and of what comes with it.
    load: how much it is. needs: values that it takes, for the case that one is lost. actor: who has done it.
    """

    what: str
    send: Callable[[Any], list[Any]]
    load: int = 1
    needs: Sequence[Remote[Any]] = ()
    refs: list[Any] = field(default_factory=list)
    actor: Any = None
    reply: Any = None
    done: bool = False
    deaths: int = 0


@dataclass(eq=False)
class Worker:
    """An actor as its employer sees it. hello: the reference of its first reply."""

    actor: Any
    hello: Any
    holds: deque[Call] = field(default_factory=deque)

    def take(self, call: Call) -> None:
        """Have it done after what the worker holds."""
        call.actor, call.refs = self.actor, call.send(self.actor)
        self.holds.append(call)

    @property
    def load(self) -> int:
        """How much it has to do."""
        return sum(call.load for call in self.holds)


class Crew:
    """So many workers. hire: starts one, which is ready for calls when it has replied with None."""

    def __init__(self, count: int, hire: Callable[[], Worker]) -> None:
        self.count, self._hire = count, hire
        self._coming, self._ready = [hire() for _ in range(count)], list[Worker]()
        self._again: deque[Call] = deque()
        self._stillborn = 0

    def run(self, calls: Iterator[Call]) -> Iterator[Call]:
        """Have the calls done; gives them back in their order. May be used while another run is under way."""
        given, more = deque[Call](), True
        while more or given:
            more = self._hand_out(calls, given)
            if given and given[0].done:
                yield given.popleft()
            elif more or given:
                self._wait()

    def _hand_out(self, calls: Iterator[Call], given: deque[Call]) -> bool:
        """Give the workers calls until they have enough, or until there are no more, which is what it returns."""
        while free := [worker for worker in self._ready if len(worker.holds) < AHEAD]:
            if self._again:
                call = self._again.popleft()
            elif (fresh := next(calls, None)) is not None:
                given.append(call := fresh)
            else:
                return False
            min(free, key=lambda worker: worker.load).take(call)
        return True

    def _wait(self) -> None:
        busy = {worker.holds[0].refs[0]: worker for worker in self._ready if worker.holds}
        coming = {worker.hello: worker for worker in self._coming}
        heard, _ = ray.wait([*busy, *coming], timeout=PATIENCE, fetch_local=False)
        if not heard and not busy:
            raise RunError(f"no worker has started in the Ray cluster within {PATIENCE:.0f} s: are its CPUs taken?")
        for ref in heard:
            self._welcome(coming[ref]) if ref in coming else self._answered(busy[ref])

    def _welcome(self, worker: Worker) -> None:
        self._coming.remove(worker)
        try:
            trouble = ray.get(worker.hello)
        except RayError as error:
            self._stillborn += 1
            if self._stillborn == TRIES:
                raise RunError(f"workers cannot start in the Ray cluster: {error}") from None
            self._coming.append(self._hire())
            return
        if trouble is not None:
            raise trouble
        self._stillborn = 0
        self._ready.append(worker)

    def _answered(self, worker: Worker) -> None:
        call = worker.holds[0]
        try:
            reply = ray.get(call.refs[0])
        except RayActorError:
            self._bury(worker)
            return
        except ObjectLostError:
            worker.holds.popleft()
            for value in call.needs:
                value.fetch()
            self._again.append(call)
            return
        worker.holds.popleft()
        if isinstance(reply, Exception):
            raise reply
        call.reply, call.done = reply, True

    def _bury(self, worker: Worker) -> None:
        """Have what it held done by others, and hire another one, for when there is room."""
        culprit = worker.holds[0]
        culprit.deaths += 1
        if culprit.deaths == TRIES:
            raise RunError(f"{TRIES} workers died while they had {culprit.what}; did they run out of memory?")
        log.warning("a worker died; again elsewhere: %s", ", ".join(call.what for call in worker.holds))
        self._dismiss(worker)
        self._ready.remove(worker)
        self._again.extend(worker.holds)
        self._coming.append(self._hire())

    @staticmethod
    def _dismiss(worker: Worker) -> None:
        with contextlib.suppress(RayError):
            ray.kill(worker.actor)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in (*self._ready, *self._coming):
            self._dismiss(worker)
        self._ready, self._coming = [], []
