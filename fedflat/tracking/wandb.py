"""Weights & Biases."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedflat.errors import UnknownNameError
from fedflat.extras import needed
from fedflat.tracking.tracker import Tracker, files, identity, inside, title

if TYPE_CHECKING:
    from fedflat.runs.result import Run

MODES = ("offline", "online")


class WandB(Tracker):
    """A run in Weights & Biases. `wandb sync RUN/wandb/offline-run-*` uploads an offline run.

    Args:
        project: The project of the run.
        mode: "offline" writes files only; "online" sends everything immediately and asks for a key if there is none.
        folder: Parent of the folder `wandb` with these files; None is the run folder.
    """

    def __init__(self, project: str = "fedflat", mode: str = "offline", folder: str | None = None) -> None:
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = needed("wandb", "Weights & Biases", "track")
        self._project, self._mode, self._folder = project, mode, folder

    def open(self, run: Run) -> None:
        """Begin or continue the run in W&B.

        Offline, W&B cannot continue closed files, and it loses most of them when it is killed: they are deleted and
        written anew. Online, W&B knows the next step.
        """
        folder = Path(self._folder) if self._folder else inside(run, ".")
        folder.mkdir(parents=True, exist_ok=True)
        name = identity(run)
        for old in folder.glob(f"wandb/offline-run-*-{name}"):
            shutil.rmtree(old)
        self._run = self._wandb.init(
            project=self._project,
            id=name,
            name=title(run),
            dir=folder,
            mode=self._mode,
            resume="allow",
            config=run.experiment.to_dict(),
            settings=self._wandb.Settings(silent=self._mode == "offline", console="off"),
        )

    def write(self, round: int, values: Mapping[str, float], spread: Mapping[str, np.ndarray], moment: float) -> None:
        """All metrics and histograms of a round in one call."""
        if round >= self._run.step:
            histograms = {name: self._wandb.Histogram(accuracies) for name, accuracies in spread.items()}
            self._run.log({**values, **histograms}, step=round)

    def close(self, run: Run) -> None:
        """Add the files, and set whether the run succeeded."""
        for file in files(run):
            copied = shutil.copy(file, self._run.dir)
            self._run.save(copied, base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if run.status in ("finished", "stopped") else 1)
