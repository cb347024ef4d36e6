"""Watching a run: the interface. Displays of progress that use it are in `fedflat.report.progress`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.result import Run


class Callback:
    """Override what you need. Methods are called in the process that calls `fedflat.run`."""

    def start(self, run: Run) -> None:
        """Before the first round (of this process: `run.metrics` is not empty when it resumes)."""

    def round(self, run: Run, metrics: Mapping[str, Any]) -> bool | None:
        """After a round; return True to stop the run here."""

    def end(self, run: Run) -> None:
        """After the last round, or when the run stops for any reason."""
