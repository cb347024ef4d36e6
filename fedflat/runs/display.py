"""Progress of runs and downloads, as live bars in a terminal or a notebook, or as plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fedflat.console import console, say, shown_path
from fedflat.core.curves import written
from fedflat.runs.callbacks import Callback
from fedflat.words import clock

if TYPE_CHECKING:
    from fedflat.experiment import Experiment
    from fedflat.runs.result import Run

LINES = 10  # about the number of lines that a run writes without a terminal
MOVES = 0.2  # seconds between movements of a bar within a round
ROWS = 12  # bars that a board shows at the same time


class Pace:
    """Estimates the time left from the rounds that this process has run."""

    def __init__(self, run: Run) -> None:
        self._first, self._began = len(run.metrics), time.monotonic()
        self._rounds = run.experiment.rounds

    def left(self, round: float) -> str:
        """The time left after so many rounds and a part of the next one, as text."""
        return clock((time.monotonic() - self._began) / (round - self._first) * (self._rounds - round))


def scores(metrics: Mapping[str, Any], lead: str = "accuracy") -> str:
    """The leading metric, the loss and the mean of the personal models, if the round has measured them."""
    names = {lead: written(lead), "loss": "loss", "personal_mean": "personal"}
    return "  ".join(f"{label} {metrics[name]:.4f}" for name, label in names.items() if metrics.get(name) is not None)


class Watcher(Callback):
    """Base class of the displays.

    Attributes:
        seen: Whether a run has started it; a run that was already finished does not.
    """

    seen = False

    def start(self, run: Run) -> None:
        """Remember that a run has started."""
        self.seen = True


class Heading(Watcher):
    """One line about the experiment, written after all checks."""

    def start(self, run: Run) -> None:
        """Write the line."""
        super().start(run)
        e = run.experiment
        where = f" → {shown_path(run.out)}" if run.out else ""
        say(f"{e.method} on {e.data}, {e.partition}, {e.clients} clients, {e.model}{where}")


class PlainProgress(Watcher):
    """Writes a line after the first round, about every tenth of the rounds, and after the last round."""

    def __init__(self, label: str = "") -> None:
        self._label = f"{label}: " if label else ""
        self._tenth = -1

    def start(self, run: Run) -> None:
        """Write where a resumed run continues."""
        super().start(run)
        self._pace, self._scores = Pace(run), ""
        done, rounds = len(run.metrics), run.experiment.rounds
        if done:
            say(f"{self._label}{'continuing after' if done < rounds else 'finished earlier,'} round {done} of {rounds}")

    def round(self, run: Run, metrics: dict[str, Any]) -> None:
        """Write a line if one is due."""
        done, rounds = metrics["round"], run.experiment.rounds
        self._scores = scores(metrics, str(run.task.get("lead", "accuracy"))) or self._scores
        if done * LINES // rounds > self._tenth:
            self._tenth = done * LINES // rounds
            say(f"{self._label}round {done}/{rounds}  {self._scores}  {self._pace.left(done)} left")


class Board:
    """Live progress bars of several runs; plain lines if there is no terminal.

        with Board() as board:
            fedflat.run(experiment, progress=False, callbacks=[board.watch("fedavg", rounds=100)])

    Args:
        single: There is only one run, so plain lines need no label.
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
        """Add a bar; returns the callback that moves it."""
        if not self.live:
            return PlainProgress("" if self._single else label)
        row = _Row(self, self.bars.add_task(label, total=rounds, status="[dim]waiting"))
        for old in self.bars.task_ids[1:-ROWS]:  # the first may be the bar of all runs together
            self.bars.update(old, visible=False)
        return row


class Bar(Watcher):
    """A bar that moves within a round and after it; `show` draws it."""

    def __init__(self) -> None:
        self._scores, self._moved = "", 0.0

    def show(self, done: float, scores: str, rest: str = "") -> None:
        """Draw the bar.

        Args:
            done: Rounds that are done, and a part of the next one.
            scores: The last metrics.
            rest: What comes next and when.
        """
        raise NotImplementedError

    def start(self, run: Run) -> None:
        """Show the rounds of earlier processes."""
        super().start(run)
        self._pace, done = Pace(run), len(run.metrics)
        self.show(done, "finished earlier" if done >= run.experiment.rounds else "")

    def client(self, run: Run, done: int, asked: int) -> None:
        """Move the bar within a round, a few times per second."""
        now = time.monotonic()
        if now - self._moved > MOVES and done < asked:
            self._moved, rounds = now, len(run.metrics) + done / asked
            self.show(rounds, self._scores, f"client {done} of {asked}  {self._pace.left(rounds)} left")

    def round(self, run: Run, metrics: dict[str, Any]) -> None:
        """Move the bar."""
        done = metrics["round"]
        self._scores = scores(metrics, str(run.task.get("lead", "accuracy"))) or self._scores
        self.show(done, self._scores, f"{self._pace.left(done)} left" if done < run.experiment.rounds else "")


class _Row(Bar):
    """One bar of a board."""

    def __init__(self, board: Board, task: Any) -> None:
        super().__init__()
        self._board, self._task = board, task

    def show(self, done: float, scores: str, rest: str = "") -> None:
        """Move the bar of rich."""
        status = f"{scores}  [dim]{rest}" if rest else scores
        self._board.bars.update(self._task, completed=done, status=status)


class Overall(Callback):
    """Progress of all runs together: the first bar of a board, or a line after every run except the last.

    Args:
        board: Where to show it.
        rounds: The number of rounds of each run.
        before: The number of other runs, which were finished earlier.
        rounds_before: Their rounds, which the bar counts as well.
    """

    def __init__(self, board: Board, rounds: Sequence[int], before: int = 0, rounds_before: int = 0) -> None:
        self._board, self._runs, self._ended = board, before + len(rounds), before
        self._done, self._total, self._began = 0, sum(rounds), time.monotonic()
        self._earlier = rounds_before
        self._bar = board.bars.add_task(f"{self._runs} runs", total=None, status="", visible=self._runs > 1)

    def start(self, run: Run) -> None:
        """Rounds of earlier processes are shown as done; the time left is estimated without them."""
        self._total -= len(run.metrics)
        self._earlier += len(run.metrics)

    def round(self, run: Run, metrics: dict[str, Any]) -> None:
        """Count a round."""
        self._done += 1
        status = f"[dim]{self._left()} left"
        done, total = self._earlier + self._done, self._earlier + self._total
        self._board.bars.update(self._bar, completed=done, total=total, status=status)

    def end(self, run: Run) -> None:
        """Write how many runs are done. The missing rounds of a run that ended early do not count any more."""
        self._ended += 1
        self._total -= run.experiment.rounds - len(run.metrics)
        going_on = self._ended < self._runs and run.status != "interrupted"
        if going_on and self._done and not self._board.live:
            say(f"{self._ended} of {self._runs} runs done, about {self._left()} left")

    def elsewhere(self, experiment: Experiment) -> None:
        """Another process has made a run."""
        self._ended += 1
        self._total -= experiment.rounds
        self._earlier += experiment.rounds

    def _left(self) -> str:
        return clock((time.monotonic() - self._began) / self._done * (self._total - self._done))


class Progress(Watcher):
    """Progress of one run: round, accuracy, loss, time left."""

    def start(self, run: Run) -> None:
        """Show the bar."""
        super().start(run)
        self._board = Board(single=True)
        self._row = self._board.watch(run.experiment.method, run.experiment.rounds)
        self._board.__enter__()
        self._row.start(run)

    def client(self, run: Run, done: int, asked: int) -> None:
        """Move the bar within a round."""
        self._row.client(run, done, asked)

    def round(self, run: Run, metrics: dict[str, Any]) -> None:
        """Move the bar."""
        self._row.round(run, metrics)

    def end(self, run: Run) -> None:
        """Leave the last state of the bar on the screen."""
        self._board.__exit__()


class NotebookBar(Bar):
    """The bar of one run in the output of the cell that started it."""

    def start(self, run: Run) -> None:
        """Show the bar."""
        from IPython.display import display

        self._name, self._rounds, self._drawn = run.experiment.method, run.experiment.rounds, 0.0
        self._state: tuple[float, str, str] = (0, "", "")
        self._handle = display(self._picture(), raw=True, display_id=True)
        super().start(run)

    def show(self, done: float, scores: str, rest: str = "") -> None:
        """Draw the bar again, a few times per second at most."""
        self._state = done, scores, rest
        if time.monotonic() - self._drawn > MOVES:
            self._draw()

    def end(self, run: Run) -> None:
        """Leave the last state in the notebook, with how the run ended unless it is finished."""
        done, scores, _ = self._state
        self._state = done, scores, "" if run.status == "finished" else run.status
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, Any]:
        done, scores, rest = self._state
        count = f"{int(done)}/{self._rounds}"
        words = f"{count}  {scores}  {rest}".strip()
        bar = f'<progress value="{done:g}" max="{self._rounds}" style="vertical-align:middle"></progress>'
        html = f'<div style="white-space:pre"><b>{escape(self._name)}</b>  {bar}  {escape(words)}</div>'
        return {"text/html": html, "text/plain": f"{self._name}  {words}"}


@contextlib.contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal; yields `update(bytes_done, bytes_total)` (total 0: unknown)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    out = console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
