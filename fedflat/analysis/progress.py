"""A bar while something long is computed, and a line about how long it will take before it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedflat.report.terminal import console
from fedflat.report.words import clock

log = logging.getLogger(__name__)
Progress = bool | Callable[[int, int], None]


@contextmanager
def tracked(progress: Progress, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` steps (more may come).

    progress: True shows a bar on stderr, False nothing; a function is called with the steps done and in total.
    """
    if callable(progress):
        with _counted(progress, total) as step:
            yield step
    elif progress:
        with _bar(label, total) as step:
            yield step
    else:
        yield lambda: None


@contextmanager
def _counted(callback: Callable[[int, int], None], total: int) -> Iterator[Callable[[], None]]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        callback(done, max(done, total))

    yield step


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("[bold]{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda: bars.advance(task)


def announce(label: str, steps: int, seconds: float, note: str = "") -> None:
    """Log what is about to be computed and about how long it takes. seconds: of one step."""
    each = f"{seconds:.2g} s each" if seconds >= 0.01 else "a few ms each"
    log.info("%s: %d steps, %s, about %s in all%s", label, steps, each, clock(steps * seconds), note)
