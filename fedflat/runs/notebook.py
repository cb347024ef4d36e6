"""Progress of a run in a notebook: one bar that is updated in place, with IPython's own display."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Any

from fedflat.runs.display import MOVES, Bar

if TYPE_CHECKING:
    from fedflat.runs.result import Run


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
