"""A bar while something long is computed, and a line about how long it will take before it starts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedflat.report.terminal import console, say
from fedflat.report.words import clock

log = logging.getLogger(__name__)
PAUSE = 30.0  # seconds between two lines
LONG = 5.0  # seconds; what takes less is over before an estimate is read
Progress = bool | Callable[[int, int], None]


@contextmanager
def tracked(progress: Progress, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` steps (more may come).

    progress: True shows a bar on stderr, or a line now and then where that is no terminal; False nothing; a function
    is called with the steps done and in total.
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
    """A line on stderr every half a minute."""

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
    """Log what is about to be computed and about how long it takes; say so where progress is shown and it is long.

    seconds: of one step.
    """
    each = f"{seconds:.2g} s each" if seconds >= 0.01 else "a few ms each"
    line = f"{label}: {steps} steps, {each}, about {clock(steps * seconds)} in all{note}"
    log.info(line)
    if progress is True and steps * seconds >= LONG:
        say(line)
