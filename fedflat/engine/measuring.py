"""What a run measures: the task's metrics that fit, those that the user wants, and which of them leads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedflat.core.samples import Samples
from fedflat.engine.setup import Setup
from fedflat.errors import InputError, UnknownNameError
from fedflat.tasks import Metric, metrics_of
from fedflat.tasks.metrics import METRICS, Wanted

COUNTED = ("train_loss", "lr", "clients", "left_out", "steps", "floats_down", "floats_up", "seconds")
"""What every row of a run has besides what is measured."""
ADDING = ("round_metrics", "test_metrics", "client_metrics")
"""Slots that add numbers of their own to the rows."""


@torch.no_grad()
def tried(setup: Setup, samples: Samples, count: int = 1) -> tuple[Any, Tensor]:
    """The model's output for the first samples, and their targets."""
    x, y = samples.batch(torch.arange(min(count, len(samples))))
    setup.model.module.eval()
    return setup.model(setup.federation.preprocess(x, None, setup.model.theta.dtype)), y


def choose_metrics(setup: Setup, wanted: Wanted = (), samples: Samples | None = None) -> None:
    """Decide what is measured: the task's metrics that the model's output fits, and those that the user wants.

    Args:
        setup: Its metrics are set.
        wanted: What the user wants.
        samples: What to try the model on; None: the data of client 0.

    Raises:
        InputError: A metric that the user wants cannot be computed.
    """
    own, task = metrics_of(wanted), metrics_of(setup.federation.task.metrics)
    try:
        output, y = tried(setup, samples or setup.federation.samples(0), count=2)  # of one, any shape looks right
    except Exception:  # a user's own model and loss may need more than one sample
        setup.metrics = [*own]
    else:
        found = {metric.name: metric for metric in task if _fits(metric, output, y)}
        for metric in own:
            try:
                metric.count(output, y)
            except Exception as error:
                raise InputError(f"metric {metric.name!r} cannot be computed: {error}") from error
            found[metric.name] = metric
        setup.metrics = list(found.values())
        setup.sum_shapes = {metric.key: tuple(metric.count(output, y).shape) for metric in setup.metrics}
    setup.lead = next((metric.name for metric in setup.metrics), "loss")


def _fits(metric: Metric, output: Any, y: Tensor) -> bool:
    try:
        metric.count(output, y)
    except Exception:
        return False
    return True


def require_recorded(setup: Setup, name: str) -> None:
    """Raise `InputError` for a number that the rows of a run will not have.

    Where parts add numbers of their own, only the first row can tell, and nothing is refused here.
    """
    if any(setup.method.filling(slot) for slot in ADDING):
        return
    names = [*(metric.name for metric in setup.metrics), "loss"]
    known = [*names, *(f"{test}_{each}" for test in setup.federation.tests for each in names), *COUNTED]
    parts = tuple(f"{each}_" for each in (*known, "clients", "personal"))  # of classes and of clients
    if name in known or name.startswith(parts):
        return
    if name in METRICS:
        remedy = f"add it with --metrics {name}, or run(metrics=[{name!r}])"
        raise InputError(f"{name!r} is not measured in this run: {remedy}")
    raise UnknownNameError("metric", name, known)


def describe_task(setup: Setup) -> dict[str, Any]:
    """What readers of the records must know: the task, its leading metric, and how to show each metric."""
    shown = {metric.name: {"falls": metric.falls, "share": metric.share} for metric in setup.metrics}
    return {
        "name": setup.federation.task.name,
        "lead": setup.lead,
        "metrics": shown | {"loss": {"falls": True, "share": False}},
        "tests": list(setup.federation.tests),
    }
