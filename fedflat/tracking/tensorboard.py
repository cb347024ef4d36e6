"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedflat.extras import needed
from fedflat.tracking.tracker import Tracker, inside

if TYPE_CHECKING:
    from fedflat.runs.result import Run


class TensorBoard(Tracker):
    """Event files for TensorBoard: `tensorboard --logdir runs`. The experiment's fields are in the tab HPARAMS.

    Args:
        folder: Folder of the event files, one folder per run; None is `tensorboard/` in the run folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._tensorboard = needed("torch.utils.tensorboard", "TensorBoard", "track")
        self._folder = folder

    def open(self, run: Run) -> None:
        """Begin an event file that replaces the earlier ones."""
        folder = self._folder or inside(run, "tensorboard")
        self._writer = self._tensorboard.SummaryWriter(folder, purge_step=1)
        fields = {name: "none" if value is None else value for name, value in run.experiment.to_dict().items()}
        for summary in self._tensorboard.summary.hparams(fields, {"accuracy": None, "loss": None})[:2]:
            self._writer.file_writer.add_summary(summary)

    def write(self, round: int, values: Mapping[str, float], spread: Mapping[str, np.ndarray], moment: float) -> None:
        """Scalars and histograms, flushed to disk immediately."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round, walltime=moment)
        for name, accuracies in spread.items():
            self._writer.add_histogram(name, accuracies, round, walltime=moment)
        self._writer.flush()

    def close(self, run: Run) -> None:
        """Close the event file."""
        self._writer.close()
