"""Where clients train. A back end runs jobs and returns their results in the order of the jobs."""

from __future__ import annotations

import logging

from fedflat.engine.backends.base import Backend
from fedflat.engine.placement import fork_hindrance
from fedflat.engine.setup import Setup
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import needed

__all__ = ["BACKENDS", "Backend", "make_backend"]

log = logging.getLogger(__name__)
BACKENDS = ("pool", "serial", "ray")


def make_backend(setup: Setup, ray_address: str | None = None) -> Backend:
    """The back end that `Experiment.backend` names; `fedflat.run` describes `ray_address`."""
    name = setup.experiment.backend
    if ray_address is not None and name != "ray":
        raise InputError(f"a Ray address needs backend='ray', but this is backend={name!r}: change one of the two")
    hindrance = fork_hindrance(setup.devices) if name == "pool" else ""
    if hindrance:
        log.warning("clients train in this process, one after another, instead of in workers: %s", hindrance)
    if name == "pool" and not hindrance:
        from fedflat.engine.backends.pool import Pool

        return Pool(setup)
    if name in ("pool", "serial"):
        from fedflat.engine.backends.serial import Serial

        return Serial(setup)
    if name == "ray":
        needed("ray", "Ray", "ray")
        from fedflat.engine.backends.ray.backend import Ray

        return Ray(setup, ray_address)
    raise UnknownNameError("backend", name, BACKENDS)
