"""Trackers copy a run's fields and metrics to TensorBoard, MLflow or Weights & Biases (the extra `track`).

They are callbacks. By default they write local files in the run folder and send nothing over the network.
"""

from __future__ import annotations

from collections.abc import Callable

from fedflat import specs
from fedflat.tracking.mlflow import MLflow
from fedflat.tracking.tensorboard import TensorBoard
from fedflat.tracking.tracker import Tracker
from fedflat.tracking.wandb import WandB

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "WandB", "trackers"]

TRACKERS: dict[str, Callable[..., Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}


def trackers(text: str) -> list[Tracker]:
    """The trackers of a list such as `"tensorboard, wandb(mode='online')"`."""
    return [specs.build("tracker", specs.parse(member), TRACKERS) for member in specs.split(text)]
