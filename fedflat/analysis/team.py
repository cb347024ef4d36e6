"""Forked processes of one thread each that share numbered jobs; what they compute lies in shared memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from fedflat.backends.pool import available_cores, die_with_parent, keep_pages
from fedflat.errors import InputError, RunError

Work = Callable[[int], None]


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that processes forked from now on see, and write to, as well."""
    count = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(count, 1) * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def team_size(workers: int, jobs: int) -> int:
    """How many processes share the jobs."""
    return max(1, min(workers or available_cores(), jobs))


class Team:
    """Does `work(0) … work(jobs − 1)` with so many processes, as often as asked; job j is always done by the same one.

    work: writes its result to a tensor made with `shared` before the team is.
    workers: 1 computes here, 0 takes every core there is.
    """

    def __init__(self, work: Work, jobs: int, workers: int) -> None:
        self._work, self._jobs = work, jobs
        self.size = team_size(workers, jobs)
        self._workers: list[tuple[Any, Connection]] = []
        if self.size > 1:
            if "fork" not in multiprocessing.get_all_start_methods():
                raise InputError("several workers need processes that fork, which this system lacks: use workers=1")
            self._workers = [self._fork(place) for place in range(self.size)]

    def _fork(self, place: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        arguments = (self._work, range(place, self._jobs, self.size), theirs, os.getpid())
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, done: Work = lambda job: None) -> None:
        """Do every job once. done: told of each finished one."""
        if not self._workers:
            for job in range(self._jobs):
                self._work(job)
                done(job)
            return
        for _, pipe in self._workers:
            pipe.send(True)
        for _ in range(self._jobs):
            done(self._receive())

    def _receive(self) -> int:
        pipe: Any = wait([pipe for _, pipe in self._workers])[0]
        try:
            reply = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RunError("a worker process died; if the machine ran out of memory, use fewer workers") from None
        if isinstance(reply, Exception):
            raise reply
        return int(reply)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


def _serve(work: Work, jobs: range, pipe: Connection, parent: int) -> None:
    """A worker's life: do its jobs at every message until it is killed or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_pages()
    die_with_parent()
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(None) and os.getppid() == parent:
            pipe.recv()
            for job in jobs:
                pipe.send(_attempt(work, job))


def _attempt(work: Work, job: int) -> int | Exception:
    try:
        work(job)
    except InputError as error:
        return InputError(str(error))
    except Exception:
        return RunError(f"a worker failed:\n{traceback.format_exc()}")
    return job
