"""Tasks: what a target is, its loss, and metrics as sums that workers can add."""

from __future__ import annotations

from fedflat.tasks.losses import LOSSES, loss_of
from fedflat.tasks.metrics import METRICS, Metric, metrics_of
from fedflat.tasks.task import TASKS, Task, task_for, task_of

__all__ = ["LOSSES", "METRICS", "TASKS", "Metric", "Task", "loss_of", "metrics_of", "task_for", "task_of"]
