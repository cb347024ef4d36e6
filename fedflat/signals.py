"""Ctrl-C and SIGTERM, held back until the server is in one piece."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Safe = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def interruptible() -> Iterator[Safe]:
    """Hold Ctrl-C and SIGTERM back until the server is in one piece: they act inside `with safe():`, or at the end."""
    waiting = inside = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        waiting = True  # also where it acts at once: an exception that strikes inside a destructor is lost
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
        yield safe  # signals are the main thread's business
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield safe
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
    if waiting:
        raise KeyboardInterrupt
