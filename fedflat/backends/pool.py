"""Worker processes on this machine, one compute thread each.

The workers are forked once, so model, method and data are there without being sent; weights, updates and client
states travel through shared memory, and only a few small numbers through pipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from fedflat.backends.base import Broadcast, Chunk, Order, load, portable, score_chunk
from fedflat.backends.mailbox import Letter, Mailbox
from fedflat.duties import perform
from fedflat.errors import InputError, RunError
from fedflat.method import State, Update, copied
from fedflat.scoring import Score
from fedflat.sums import Terms
from fedflat.task import Task

log = logging.getLogger(__name__)
VECTORS = ("delta", "buffers", "counters")
AHEAD = 2  # jobs a worker may hold: the next one is there when it finishes
PLAIN = ("client", "samples", "weight", "steps", "loss", "seconds", "failure", "figures", "norm", "floats")


class Slot:
    """Shared memory for one job under way: the client's state going out, its update coming back."""

    def __init__(self) -> None:
        self.inbox, self.outbox = Mailbox(), Mailbox()


class Worker:
    """One process as its parent sees it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.holds: deque[tuple[int, str]] = deque()  # (position, description) of the jobs it has


class Pool:
    """Persistent forked workers. The result does not depend on how many there are."""

    def __init__(self, task: Task) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise InputError("the pool needs processes that fork, which this system lacks: use backend='serial'")
        count = task.experiment.workers or available_cores()
        self.task, self._board = task, Mailbox()
        self._slots = [Slot() for _ in range(AHEAD * count + 1)]
        self._workers: list[Worker] = []
        for _ in range(count):
            self._workers.append(self._fork())

    def _fork(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        arguments = (self.task, theirs, self._board, self._slots, os.getpid())
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """See `Backend.visit`."""
        letter = self._post(broadcast)
        free = deque(range(len(self._slots)))

        def messages() -> Iterator[tuple[Any, str]]:
            for order in orders:
                slot = free.popleft()
                own = {} if order.theta is None else {"theta": order.theta}
                states = self._slots[slot].inbox.write(own | pack({"": order.states}))
                where = f"client {order.client} in round {broadcast.round}"
                yield ("visit", letter, slot, order.client, order.weight, order.duty, states), where

        for slot, plain, update in self._run(messages(), lambda: bool(free)):
            yield Update(**plain, **unpack_update(self._slots[slot].outbox.read(update)))
            free.append(slot)

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        letter = self._post(broadcast)
        return list(self._run(((("score", letter, chunk), str(chunk)) for chunk in chunks), lambda: True))

    def _post(self, broadcast: Broadcast) -> tuple[int, float, Letter]:
        tensors = {"theta": broadcast.theta, "buffers": broadcast.buffers, "counters": broadcast.counters}
        letter = self._board.write(tensors | pack({"received": broadcast.received}))
        return broadcast.round, broadcast.lr, letter

    def _run(self, messages: Iterator[tuple[Any, str]], room: Any) -> Iterator[Any]:
        """Keep the workers supplied; give replies in the order of the messages."""
        if any(worker.holds for worker in self._workers):
            raise RunError("the pool still has work of an earlier call, whose results were not all taken")
        replies: dict[int, Any] = {}
        sent = given = 0
        exhausted = False
        while True:
            while not exhausted and room() and (worker := self._least_loaded()) is not None:
                item = next(messages, None)
                if item is None:
                    exhausted = True
                    break
                worker.holds.append((sent, item[1]))
                try:
                    worker.pipe.send(item[0])
                except OSError:
                    raise self._died(worker) from None
                sent += 1
            if given in replies:
                yield replies.pop(given)
                given += 1
            elif exhausted and given == sent:
                return
            else:
                self._receive(replies)

    def _least_loaded(self) -> Worker | None:
        worker = min(self._workers, key=lambda w: len(w.holds))
        return worker if len(worker.holds) < AHEAD else None

    def _receive(self, replies: dict[int, Any]) -> None:
        busy = {worker.pipe: worker for worker in self._workers if worker.holds}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            position, _ = worker.holds[0]
            try:
                ok, reply = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                raise self._died(worker) from None
            if not ok:
                raise reply
            worker.holds.popleft()
            replies[position] = reply

    @staticmethod
    def _died(worker: Worker) -> BaseException:
        worker.process.join(1)
        if worker.process.exitcode == -signal.SIGTERM:  # sent to the whole group, as schedulers do
            return KeyboardInterrupt()
        return RunError(
            f"a worker process died (exit code {worker.process.exitcode}) while it had {worker.holds[0][1]}; "
            "if the machine ran out of memory, use fewer workers"
        )

    def close(self) -> None:
        """End the workers, at once if they are in the middle of something."""
        for worker in self._workers:
            if worker.holds:
                worker.process.kill()
            else:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        for box in (self._board, *(b for s in self._slots for b in (s.inbox, s.outbox))):
            box.close()
        self._slots = []


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- inside a worker ----


def work(task: Task, pipe: Connection, board: Mailbox, slots: list[Slot], parent: int) -> None:
    """A worker's life: answer messages until the pipe closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_pages()
    die_with_parent()
    gc.freeze()  # what was inherited need not be looked through for garbage, which would copy its pages, too
    try:
        while True:
            while not pipe.poll(2.0):
                if os.getppid() != parent:
                    return
            message = pipe.recv()
            if message is None:
                return
            try:
                reply = True, answer(task, board, slots, message)
            except Exception as error:
                reply = False, portable(error, message[0])
            pipe.send(reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def answer(task: Task, board: Mailbox, slots: list[Slot], message: Any) -> Any:
    """Do what one message asks for."""
    kind, (round, lr, letter), *rest = message
    tensors = board.read(letter)
    sent = {name: tensors.pop(name) for name in ("theta", "buffers", "counters")}
    broadcast = Broadcast(round, lr, **sent, received=unpack(tensors).get("received", {}))
    if kind == "score":
        load(task, broadcast)
        return score_chunk(task, rest[0])
    slot, client, weight, duty, states = rest
    own = slots[slot].inbox.read(states)
    theta = own.pop("theta", None)
    kept = unpack(own).get("", {})
    update = perform(task, Order(client, weight, kept, duty, theta).job(broadcast, kept))
    plain = {name: getattr(update, name) for name in PLAIN}
    return slot, plain, slots[slot].outbox.write(pack_update(update))


def die_with_parent() -> None:
    """Have Linux kill this process with its parent, so that no orphan keeps cores or the run folder's lock."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def keep_pages() -> None:
    """Have glibc keep freed memory: giving large temporaries back at every step costs 10–20 % in page faults."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, (1 << 31) - 1)


# ---- nested dictionaries as flat ones ----


def pack(nested: Mapping[str, Mapping[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """{kind: {part: {name: tensor}}} with joined names; parts with nothing in them are kept by an empty tensor."""
    flat = {}
    for kind, parts in nested.items():
        for part, tensors in parts.items():
            flat[f"{kind}/{part}/"] = torch.empty(0)
            flat |= {f"{kind}/{part}/{name}": tensor for name, tensor in tensors.items()}
    return flat


def unpack(flat: Mapping[str, Tensor]) -> dict[str, dict[str, State]]:
    """The inverse of `pack`."""
    nested: dict[str, dict[str, State]] = {}
    for key, tensor in flat.items():
        kind, part, name = key.split("/", 2)
        state = nested.setdefault(kind, {}).setdefault(part, {})
        if name:
            state[name] = tensor
    return nested


def pack_update(update: Update) -> dict[str, Tensor]:
    """The tensors of an update by name."""
    own = {name: getattr(update, name) for name in VECTORS}
    shares = {} if update.shares is None else {"": update.shares.here()}
    return own | pack({"sent": update.sent, "states": update.states, "shares": shares})


def unpack_update(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of `pack_update`, with copies of all but the states, which the store copies itself."""
    own = {name: tensors.pop(name).clone() for name in VECTORS}
    nested = unpack(tensors)
    shares = Terms(copied(nested["shares"])[""]) if "shares" in nested else None
    return own | {"sent": copied(nested.get("sent", {})), "states": nested.get("states", {}), "shares": shares}
