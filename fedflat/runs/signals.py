"""Ctrl-C and SIGTERM, delayed until the server's state is consistent."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Safe = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def interruptible() -> Iterator[Safe]:
    """Delay Ctrl-C and SIGTERM: they raise `KeyboardInterrupt` only inside `with safe():` or at the end."""
    waiting = inside = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        waiting = True  # also if it raises now: Python drops an exception that is raised inside a destructor
        if inside:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def safe() -> Iterator[None]:
        nonlocal inside
        if waiting:
            raise KeyboardInterrupt
        inside = True
        try:
            yield
        finally:
            inside = False

    if threading.current_thread() is not threading.main_thread():
        yield safe  # only the main thread can handle signals
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield safe
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
    if waiting:
        raise KeyboardInterrupt
