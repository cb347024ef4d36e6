"""Trackers: a run's fields and figures in TensorBoard, MLflow or Weights & Biases (the extra `track`).

They are callbacks that write local files, in the run folder unless told otherwise; nothing leaves the machine unless
you ask for it.
"""

from __future__ import annotations

from collections.abc import Callable

from fedflat import calls
from fedflat.tracking.base import Tracker
from fedflat.tracking.mlflow import MLflow
from fedflat.tracking.tensorboard import TensorBoard
from fedflat.tracking.wandb import WandB

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "WandB", "trackers"]

TRACKERS: dict[str, Callable[..., Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}


def trackers(text: str) -> list[Tracker]:
    """The trackers that a list such as `"tensorboard, wandb(mode='online')"` names."""
    return [calls.build("tracker", calls.parse(member), TRACKERS) for member in calls.split(text)]
