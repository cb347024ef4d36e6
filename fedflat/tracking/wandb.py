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
from fedflat.tracking.base import Tracker, files, identity, inside, title

if TYPE_CHECKING:
    from fedflat.result import Run

MODES = ("offline", "online")


class WandB(Tracker):
    """A run in Weights & Biases. `wandb sync RUN/wandb/offline-run-*` sends it there, once you want that.

    project: which the run belongs to. mode: "offline" writes files only; "online" sends everything at once and asks for
    a key where there is none. folder: where the folder `wandb` of these files goes; None is the run folder.
    """

    def __init__(self, project: str = "fedflat", mode: str = "offline", folder: str | None = None) -> None:
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = needed("wandb", "Weights & Biases", "track")
        self._project, self._mode, self._folder = project, mode, folder

    def open(self, run: Run) -> None:
        """Have W&B go on with the run.

        Offline, it cannot go on with files that it has closed, and loses most of them when it is killed: so they are
        deleted and written anew. Online, it knows which step comes next.
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
        """All figures of a round in one go, with histograms."""
        if round >= self._run.step:
            histograms = {name: self._wandb.Histogram(accuracies) for name, accuracies in spread.items()}
            self._run.log({**values, **histograms}, step=round)

    def close(self, run: Run) -> None:
        """Add the files, and say whether the run went well."""
        for file in files(run):
            copied = shutil.copy(file, self._run.dir)
            self._run.save(copied, base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if run.status in ("finished", "stopped") else 1)
