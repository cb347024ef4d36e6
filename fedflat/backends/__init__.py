"""Where clients train. A back end runs jobs and hands their results back in the order they were given."""

from __future__ import annotations

from fedflat.backends.base import Backend, Broadcast
from fedflat.client import Task
from fedflat.errors import UnknownNameError

__all__ = ["BACKENDS", "Backend", "Broadcast", "make_backend"]

BACKENDS = ("pool", "serial")


def make_backend(task: Task) -> Backend:
    """The back end that `Experiment.backend` names, holding `task`."""
    name = task.experiment.backend
    if name == "pool":
        from fedflat.backends.pool import Pool

        return Pool(task)
    if name == "serial":
        from fedflat.backends.serial import Serial

        return Serial(task)
    raise UnknownNameError("backend", name, BACKENDS)
