"""A disk whose power is cut: what was not synced may be lost, kept, or kept in part."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class PowerCut(BaseException):
    """The power is gone. No handler of the library may catch it."""


class Disk:
    """Follows what a process makes durable in a folder, and cuts the power at one of its steps.

    A step is a call of fsync, rename, unlink or truncate. File contents are durable as of the last fsync of the file,
    names as of the last fsync of their folder. Everything else is up to chance when the power goes, each file and each
    name for itself: the harshest disk that POSIX allows.

    Args:
        folder: The folder to follow; nothing in it counts as durable yet unless `settled`.
        image: Where to put what is left after the cut.
        at: The number of the step before which the power goes.
        luck: Decides what is left of what was not synced.
        settled: All that is in the folder now is durable.
    """

    def __init__(self, folder: Path, image: Path, at: float, luck: random.Random, settled: bool = False) -> None:
        self.folder, self.image, self.at, self.luck, self.steps = folder.resolve(), image, at, luck, 0
        self._contents: dict[int, bytes] = {}  # inode → durable content
        self._names: dict[Path, dict[str, int]] = {}  # folder → durable names and their inodes
        self._held: list[int] = []  # open files keep their inodes from being used again
        if settled:
            for path in (self.folder, *self.folder.rglob("*")):
                self._note(os.open(path, os.O_RDONLY))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow this process inside the block."""
        real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink", "truncate")}
        for name, call in real.items():
            setattr(os, name, self._hooked(name, call))
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)
            for descriptor in self._held:
                os.close(descriptor)

    def _hooked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                self._leave(self.folder, self.image)
                raise PowerCut
            result = call(*args, **kwargs)
            if name == "fsync":
                self._note(os.dup(args[0]))
            return result

        return step

    def _note(self, descriptor: int) -> None:
        self._held.append(descriptor)
        path, state = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            self._names[path] = _inodes(path)
        else:
            self._contents[state.st_ino] = path.read_bytes()

    def _leave(self, folder: Path, image: Path) -> None:
        image.mkdir(parents=True, exist_ok=True)
        durable, current = self._names.get(folder, {}), _inodes(folder)
        for name in sorted(durable.keys() | current.keys()):
            inode = self.luck.choice([durable.get(name), current.get(name)])
            if inode is None or name == ".lock":
                continue
            path = folder / name
            if path.is_dir():
                self._leave(path, image / name)
            else:
                now = path.read_bytes() if inode == current.get(name) else None
                (image / name).write_bytes(self._content(self._contents.get(inode, b""), now))

    def _content(self, synced: bytes, now: bytes | None) -> bytes:
        """What is left of a file: what was synced, what is there now, or what was written of it up to some byte."""
        if now is None or now == synced:
            return synced
        start = len(synced) if now.startswith(synced) else 0
        return self.luck.choice([synced, now, now[: self.luck.randint(start, len(now))]])


def _inodes(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
