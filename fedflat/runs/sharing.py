"""Work in run folders that several processes share: each takes what nobody works on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from fedflat.console import say
from fedflat.errors import FolderInUseError
from fedflat.runs.folder import RunFolder

T = TypeVar("T")


class Queue(Generic[T]):
    """Tasks one after another; those with which another process is busy come last.

    Args:
        tasks: What is not done yet.
        busy: Whether another process works on a task, or on what it needs.
        done: Whether a task is done, maybe by another process.
        elsewhere: Told of a task that another process has done.
    """

    def __init__(
        self,
        tasks: Iterable[T],
        busy: Callable[[T], bool],
        done: Callable[[T], bool],
        elsewhere: Callable[[T], None] = lambda task: None,
    ) -> None:
        self._free, self._put_off, self._told = deque(tasks), deque[T](), False
        self._busy, self._done, self._elsewhere = busy, done, elsewhere

    def put_off(self, task: T) -> None:
        """Another process works on it."""
        self._put_off.append(task)

    def __iter__(self) -> Iterator[T]:
        while self._free or self._put_off:
            if not self._free:
                self._wait()
            task = self._free.popleft()
            if self._busy(task):
                self.put_off(task)
            elif self._done(task):
                self._elsewhere(task)
            else:
                yield task

    def _wait(self) -> None:
        """Look again after a second at what others work on."""
        if not self._told:
            say(f"waiting for other processes; runs still with them: {len(self._put_off)}")
        self._told = True
        time.sleep(1)
        self._free, self._put_off = self._put_off, self._free


def locked(tasks: Iterable[T], folder: Callable[[T], Path], done: Callable[[T], bool]) -> Iterator[T]:
    """The tasks that are not done, each while its folder is locked, for work that does not lock it itself."""
    queue = Queue((task for task in tasks if not done(task)), lambda task: RunFolder(folder(task)).in_use, done)
    for task in queue:
        home = RunFolder(folder(task))
        try:
            home.lock()
        except FolderInUseError:
            queue.put_off(task)
            continue
        try:
            if not done(task):
                yield task
        finally:
            home.unlock()
