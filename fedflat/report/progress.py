"""Progress on the screen: of one run, of several, without a terminal, of downloads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedflat.callbacks import Callback
from fedflat.report.terminal import console, say, shown_path
from fedflat.report.words import clock

if TYPE_CHECKING:
    from fedflat.result import Run

LINES = 10  # a run without a terminal writes about so many
ROWS = 12  # bars that a board shows at a time


class Pace:
    """Time left, judged by the rounds since this process took the run up."""

    def __init__(self, run: Run) -> None:
        self._first, self._began = len(run.metrics), time.monotonic()
        self._rounds = run.experiment.rounds

    def left(self, round: int) -> str:
        """Time left after a round, as a clock."""
        return clock((time.monotonic() - self._began) / (round - self._first) * (self._rounds - round))


def scores(metrics: Mapping[str, Any]) -> str:
    """Accuracy, loss and the mean accuracy of the clients' own models, where the round has them."""
    names = {"accuracy": "accuracy", "loss": "loss", "personal_mean": "personal"}
    return "  ".join(f"{label} {metrics[name]:.4f}" for name, label in names.items() if metrics.get(name) is not None)


class Watcher(Callback):
    """A display. seen: whether a run has started it; one that is found finished never does."""

    seen = False

    def start(self, run: Run) -> None:
        """Take note."""
        self.seen = True


class Heading(Watcher):
    """One line about what is run, once everything about it is known to be in order."""

    def start(self, run: Run) -> None:
        """Write the line."""
        super().start(run)
        e = run.experiment
        where = f" → {shown_path(run.out)}" if run.out else ""
        say(f"{e.method} on {e.data}, {e.partition}, {e.clients} clients, {e.model}{where}")


class PlainProgress(Watcher):
    """A line after the first round, after about every tenth of the rounds, and after the last."""

    def __init__(self, label: str = "") -> None:
        self._label = f"{label}: " if label else ""
        self._tenth = -1

    def start(self, run: Run) -> None:
        """Say where a resumed run goes on."""
        super().start(run)
        self._pace, self._scores = Pace(run), ""
        done, rounds = len(run.metrics), run.experiment.rounds
        if done:
            say(f"{self._label}{'going on after' if done < rounds else 'finished earlier,'} round {done} of {rounds}")

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Write a line if it is time for one."""
        done, rounds = metrics["round"], run.experiment.rounds
        self._scores = scores(metrics) or self._scores
        if done * LINES // rounds > self._tenth:
            self._tenth = done * LINES // rounds
            say(f"{self._label}round {done}/{rounds}  {self._scores}  {self._pace.left(done)} left")


class Board:
    """Live bars of several runs, one below the other; plain lines where there is no terminal.

    single: the lines need not say which run they are about.

    with Board() as board:
        fedflat.run(experiment, progress=False, callbacks=[board.watch("fedavg", rounds=100)])
    """

    def __init__(self, *, single: bool = False) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console(stderr=True),
        )
        self.live, self._single = self.bars.console.is_terminal, single

    def __enter__(self) -> Board:
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.bars.stop()

    def watch(self, label: str, rounds: int) -> Watcher:
        """A callback that moves a new bar."""
        if not self.live:
            return PlainProgress("" if self._single else label)
        row = _Row(self, self.bars.add_task(label, total=rounds, status="[dim]waiting"))
        for old in self.bars.task_ids[1:-ROWS]:  # the first may be of all runs together
            self.bars.update(old, visible=False)
        return row


class _Row(Watcher):
    """One bar of a board."""

    def __init__(self, board: Board, task: Any) -> None:
        self._board, self._task, self._scores = board, task, ""

    def start(self, run: Run) -> None:
        """Start the clock."""
        super().start(run)
        self._pace, done = Pace(run), len(run.metrics)
        status = "finished earlier" if done >= run.experiment.rounds else ""
        self._board.bars.update(self._task, completed=done, status=status)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Move the bar."""
        done = metrics["round"]
        self._scores = scores(metrics) or self._scores
        left = f"  [dim]{self._pace.left(done)} left" if done < run.experiment.rounds else ""
        self._board.bars.update(self._task, completed=done, status=self._scores + left)


class Overall(Callback):
    """Several runs together, with the time left: the first bar of a board, or a line after every run but the last.

    rounds: of each run. before: how many more runs there are that were done earlier.
    """

    def __init__(self, board: Board, rounds: Sequence[int], before: int = 0) -> None:
        self._board, self._runs, self._ended = board, before + len(rounds), before
        self._done, self._total, self._began = 0, sum(rounds), time.monotonic()
        self._bar = board.bars.add_task(f"{self._runs} runs", total=None, status="", visible=self._runs > 1)

    def start(self, run: Run) -> None:
        """Leave out what was done earlier."""
        self._total -= len(run.metrics)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Count a round."""
        self._done += 1
        status = f"[dim]{self._left()} left"
        self._board.bars.update(self._bar, completed=self._done, total=self._total, status=status)

    def end(self, run: Run) -> None:
        """Say how far all are; a run that ended early leaves no rounds to wait for."""
        self._ended += 1
        self._total -= run.experiment.rounds - len(run.metrics)
        going_on = self._ended < self._runs and run.status != "interrupted"
        if going_on and self._done and not self._board.live:
            say(f"{self._ended} of {self._runs} runs done, about {self._left()} left")

    def _left(self) -> str:
        return clock((time.monotonic() - self._began) / self._done * (self._total - self._done))


class Progress(Watcher):
    """A board of one run: round, accuracy, loss, time left; plain lines where there is no terminal."""

    def start(self, run: Run) -> None:
        """Show the bar."""
        super().start(run)
        self._board = Board(single=True)
        self._row = self._board.watch(run.experiment.method, run.experiment.rounds)
        self._board.__enter__()
        self._row.start(run)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Move it."""
        self._row.round(run, metrics)

    def end(self, run: Run) -> None:
        """Leave its last state on the screen."""
        self._board.__exit__()


@contextlib.contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal; yields what to call with bytes done and bytes in total (0 if unknown)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    out = console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
