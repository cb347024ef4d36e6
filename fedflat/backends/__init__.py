"""Where clients train. A back end runs jobs and hands their results back in the order they were given."""

from __future__ import annotations

from fedflat.backends.base import Backend, Broadcast
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import needed
from fedflat.task import Task

__all__ = ["BACKENDS", "Backend", "Broadcast", "make_backend"]

BACKENDS = ("pool", "serial", "ray")


def make_backend(task: Task, ray_address: str | None = None) -> Backend:
    """The back end that `Experiment.backend` names, holding `task`. ray_address: see `fedflat.run`."""
    name = task.experiment.backend
    if ray_address is not None and name != "ray":
        raise InputError(f"a Ray address is for backend='ray', and this is backend={name!r}: leave out one of the two")
    if name == "pool":
        from fedflat.backends.pool import Pool

        return Pool(task)
    if name == "serial":
        from fedflat.backends.serial import Serial

        return Serial(task)
    if name == "ray":
        needed("ray", "Ray", "ray")
        from fedflat.backends.ray import Ray

        return Ray(task, ray_address)
    raise UnknownNameError("backend", name, BACKENDS)
