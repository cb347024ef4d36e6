"""Worker processes that are forked from this one and inherit its data."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedflat.core.processes import become_worker
from fedflat.core.scheduler import Call, WorkerDiedError
from fedflat.errors import FedflatError, InputError, RunError


def can_fork() -> bool:
    """Whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def in_child(function: Callable[[], Any]) -> Any:
    """What the function returns in a forked process, which leaves no trace in this one. It must be picklable."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(function()))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join()


def gradients_survive() -> bool:
    """Whether a forked process can compute gradients. Asked of a child, as PyTorch does not tell.

    Where there is an accelerator, PyTorch starts threads for the first backward pass of a process, on whatever device,
    and a process with these threads cannot fork one that computes gradients.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def wait_for(pipes: Sequence[Any], seconds: float | None) -> Sequence[Any]:
    """See `Scheduler`. Does what `multiprocessing.connection.wait` does, in a fifth of its time."""
    poll, by_file = select.poll(), {pipe.fileno(): pipe for pipe in pipes}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(None if seconds is None else 1000 * seconds)]


class ForkedWorker:
    """A process that answers requests with `answer(request)`, until it is closed or its parent has ended."""

    starting = False

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(answer, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self.holds: deque[Call] = deque()

    @property
    def waitable(self) -> Any:
        """See `Worker`."""
        return self._pipe

    def send(self, call: Call) -> None:
        """See `Worker`."""
        try:
            self._pipe.send_bytes(pickle.dumps(call.request, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """See `Worker`."""
        try:
            fine, reply = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if not fine:
            raise reply
        return reply

    def _death(self) -> BaseException:
        self._process.join(1)
        if self._process.exitcode == -signal.SIGTERM:  # cluster schedulers send it to the whole process group
            return KeyboardInterrupt()
        return WorkerDiedError(f"exit code {self._process.exitcode}")

    def used(self) -> float | None:
        """See `Worker`."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # only Linux has this file
            values = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
        return None

    def close(self) -> None:
        """See `Worker`. A busy process is killed."""
        if not self.holds:
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(pickle.dumps(None))
            self._process.join(5)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _serve(answer: Callable[[Any], Any], pipe: Connection, parent: int) -> None:
    """Answer requests until told to stop or until the parent has ended."""
    become_worker()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            while not wait_for([pipe], 2.0):
                if os.getppid() != parent:
                    return
            request = pickle.loads(pipe.recv_bytes())
            if request is None:
                return
            try:
                reply = True, answer(request)
            except Exception as error:
                reply = False, portable(error)
            pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def portable(error: Exception) -> FedflatError:
    """The exception that a worker is handling, in a form that can be sent."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, InputError):
        return InputError(str(error))
    return RunError(f"a worker failed:\n{traceback.format_exc()}")
