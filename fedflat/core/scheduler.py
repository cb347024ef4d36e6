"""Distribute calls to workers and return them in order; if a worker dies, another one repeats its calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedflat.errors import RunError

log = logging.getLogger(__name__)
AHEAD = 2  # calls that a worker may hold, so that it never waits for the next one
QUIET = 60.0  # seconds without any reply after which we look after the workers
STUCK = 10  # times in a row that a worker may be found without having used the processor; then it counts as dead
TRIES = 3  # workers that may die during one call, or in a row while starting


class WorkerDiedError(Exception):
    """The worker has ended, and another one must do its calls. The message says how it ended."""


class RepeatCallError(Exception):
    """The call failed because a value that it needs was lost; `restore` makes it again, and may use the scheduler."""

    def __init__(self, restore: Callable[[], None]) -> None:
        super().__init__()
        self.restore = restore


@dataclass(eq=False)
class Call:
    """A piece of work for a worker.

    Attributes:
        what: Describes it, for messages.
        request: What is sent to the worker.
        size: The amount of work.
        worker: The index of the only worker that may do it; None: any worker.
        reply: What the worker returned.
    """

    what: Callable[[], str]
    request: Any
    size: int = 1
    worker: int | None = None
    reply: Any = None
    done: bool = False
    deaths: int = 0


class Worker(Protocol):
    """A process or an actor that answers calls one after another, in the order in which they were sent."""

    starting: bool
    """Whether it cannot take calls yet; `waitable` is then ready once it can."""
    holds: deque[Call]

    @property
    def waitable(self) -> Any:
        """An argument of the scheduler's `wait`: ready once the worker has started, or answered its oldest call."""

    def send(self, call: Call) -> None:
        """Append the call to those that the worker holds. Raises `WorkerDiedError`."""

    def receive(self) -> Any:
        """The next reply. Raises what the call raised, and the two errors of this module."""

    def used(self) -> float | None:
        """Seconds of processor time it has used so far, as a sign of life; None if that is unknown."""

    def close(self) -> None:
        """End the worker, whatever it is doing."""


Wait = Callable[[Sequence[Any], float | None], Sequence[Any]]


class Scheduler:
    """Keeps workers supplied with calls.

    Args:
        count: Number of workers.
        start: Makes a new worker from its index, 0 … count − 1.
        wait: Waits until at least one of the waitables is ready, or for a number of seconds (None: without limit);
            returns those that are ready.
        limit: How many calls may be running, or finished and not yet taken; None: no limit.
        patience: Seconds to wait for a worker to start if no other one is running.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], Worker],
        wait: Wait,
        *,
        limit: int | None = None,
        patience: float | None = None,
    ) -> None:
        self._start, self._wait, self._limit, self._patience = start, wait, limit, patience
        self.workers = [start(place) for place in range(count)]
        self._again: deque[Call] = deque()
        self._failed_starts = 0
        self._seen: dict[Worker, tuple[float | None, int]] = {}  # processor time when last asked, times without change

    @property
    def busy(self) -> bool:
        """Whether workers still hold calls of an earlier run."""
        return any(worker.holds for worker in self.workers)

    def run(self, calls: Iterator[Call]) -> Iterator[Call]:
        """Do the calls and yield them in their order. May be used during another run."""
        given, more = deque[Call](), True
        while more or given:
            more = self._hand_out(calls, given)
            if given and given[0].done:
                yield given.popleft()
            elif more or given:
                self._listen()

    def _hand_out(self, calls: Iterator[Call], given: deque[Call]) -> bool:
        """Give calls to the workers until they have enough; returns whether there may be more calls."""
        while free := self._free():
            if self._again:
                call = self._again.popleft()
            elif self._limit is not None and len(given) >= self._limit:
                return True
            elif (fresh := next(calls, None)) is not None:
                given.append(call := fresh)
            else:
                return False
            while call.worker is not None and self.workers[call.worker] not in free:
                self._listen()
                free = self._free()
            worker = min(free, key=_load) if call.worker is None else self.workers[call.worker]
            worker.holds.append(call)
            try:
                worker.send(call)
            except WorkerDiedError as death:
                self._replace(worker, death)
        return True

    def _free(self) -> list[Worker]:
        return [worker for worker in self.workers if len(worker.holds) < AHEAD and not worker.starting]

    def _listen(self) -> None:
        """Wait until any worker has started or replied, and process that."""
        waiting = {worker.waitable: worker for worker in self.workers if worker.starting or worker.holds}
        heard = self._wait(list(waiting), min(self._patience or QUIET, QUIET) if self.busy else self._patience)
        if not heard and not self.busy:
            raise RunError(f"no worker has started within {self._patience:.0f} s: are all cores taken?")
        if not heard:
            self._look_after()
        for waitable in heard:
            worker = waiting[waitable]
            current = worker in self.workers and (worker.starting or worker.holds) and worker.waitable == waitable
            if current:  # otherwise it was heard while a lost value was restored
                self._hear(worker)

    def _look_after(self) -> None:
        """Say who is computing when nobody has replied for a while, and replace workers that do nothing at all."""
        for worker in [worker for worker in self.workers if worker.holds]:
            used, (before, idle) = worker.used(), self._seen.get(worker, (None, 0))
            idle = idle + 1 if used is not None and used == before else 0
            self._seen[worker] = used, idle
            how = (logging.WARNING, "uses no processor: is it stuck?") if idle else (logging.INFO, "is at work")
            log.log(how[0], "no reply for %g s: %s %s", QUIET, worker.holds[0].what(), how[1])
            if idle >= STUCK:
                worker.holds[0].deaths = max(worker.holds[0].deaths, TRIES - 2)  # it would hang again: try once more
                self._replace(worker, WorkerDiedError(f"it has done nothing for {STUCK * QUIET:g} s"))

    def _hear(self, worker: Worker) -> None:
        started = not worker.starting
        try:
            reply = worker.receive()
        except WorkerDiedError as death:
            self._replace(worker, death)
            return
        except RepeatCallError as loss:
            call = worker.holds.popleft()  # first, as `restore` may listen to the workers itself
            loss.restore()
            self._again.append(call)
            return
        except BaseException:
            if started:
                worker.holds.popleft()
            raise
        if started:
            call = worker.holds.popleft()
            call.reply, call.done = reply, True
        else:
            self._failed_starts = 0

    def _replace(self, worker: Worker, death: WorkerDiedError) -> None:
        """Let other workers do what this one held, and start a new one in its place."""
        if worker.holds:
            worker.holds[0].deaths += 1
            what = [call.what() for call in worker.holds]
            if worker.holds[0].deaths == TRIES:
                raise RunError(f"{TRIES} workers died while they had {what[0]} ({death}); out of memory?")
            log.warning("a worker died (%s); repeating: %s", death, ", ".join(what))
        elif worker.starting:
            self._failed_starts += 1
            if self._failed_starts == TRIES:
                raise RunError(f"workers cannot start: {death}")
        worker.close()
        self._seen.pop(worker, None)
        self._again.extend(worker.holds)
        place = self.workers.index(worker)
        self.workers[place] = self._start(place)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self.workers = []


def _load(worker: Worker) -> int:
    return sum(call.size for call in worker.holds)
