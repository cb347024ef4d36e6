"""A progress bar for long computations, and an estimate of their duration before they start."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedflat.console import console, say
from fedflat.words import clock

log = logging.getLogger(__name__)
PAUSE = 30.0  # seconds between two lines
LONG = 5.0  # seconds; a shorter computation ends before anybody reads the estimate
Progress = bool | Callable[[int, int], None]


@contextmanager
def tracked(progress: Progress, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of the expected `total` steps; there may be more.

    Args:
        progress: True shows a bar on stderr, or prints a line every half minute if stderr is not a terminal. False
            shows nothing. A function is called with the number of steps done and the total number.
    """
    if progress is False:
        yield lambda: None
    elif progress is True and sys.stderr.isatty():
        with _bar(label, total) as step:
            yield step
    else:
        yield _counter(_Lines(label) if progress is True else progress, total)


def _counter(callback: Callable[[int, int], None], total: int) -> Callable[[], None]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        callback(done, max(done, total))

    return step


class _Lines:
    """Prints a line on stderr every half minute."""

    def __init__(self, label: str) -> None:
        self._label, self._began, self._lines = label, time.monotonic(), 0

    def __call__(self, done: int, total: int) -> None:
        passed = time.monotonic() - self._began
        if passed >= PAUSE * (self._lines + 1):
            self._lines = int(passed / PAUSE)
            say(f"{self._label}: {done} of {total}, about {clock(passed / done * (total - done))} left")


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("[bold]{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda: bars.advance(task)


def announce(progress: Progress, label: str, steps: int, seconds: float, note: str = "") -> None:
    """Log what is computed next and how long it takes; print it as well if progress is shown and it takes long.

    Args:
        seconds: Duration of one step.
    """
    each = f"{seconds:.2g} s each" if seconds >= 0.01 else "a few ms each"
    line = f"{label}: {steps} steps, {each}, about {clock(steps * seconds)} in all{note}"
    log.info(line)
    if progress is True and steps * seconds >= LONG:
        say(line)
