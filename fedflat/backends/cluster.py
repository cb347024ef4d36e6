"""Joining a Ray cluster that runs, or starting one on this machine, and leaving things as they were found."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray

from fedflat.backends.pool import available_cores
from fedflat.errors import InputError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SECONDS = 5.0  # to wait for an answer from a cluster's address


class Session:
    """This process's place in a cluster.

    address: "host:port" of a cluster, "auto" for the one this machine belongs to, "local" to start one with so many
    CPUs that ends with the session; None is $RAY_ADDRESS, else "local". A process that is in a cluster stays in it.
    """

    def __init__(self, address: str | None, cpus: int | None) -> None:
        self.open = True
        self._leave = _stay if ray.is_initialized() else _join(address or os.environ.get("RAY_ADDRESS", "local"), cpus)
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.cpus < 1:
            self.close()
            raise InputError("the Ray cluster has no CPUs for workers: start a node with `ray start --num-cpus`")

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        self.open = False
        self._leave()


def _stay() -> None:
    pass


def _join(address: str, cpus: int | None) -> Callable[[], None]:
    """Connect; returns what undoes it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what is lost is made again, which is said once
    if address == "local":
        return _start(cpus or available_cores())
    if address != "auto":
        _knock(address)
    _connect(address=address)
    leave: Callable[[], None] = ray.shutdown
    return leave


def _start(cpus: int) -> Callable[[], None]:
    folder = tempfile.mkdtemp(prefix="fedflat-ray-")

    def end() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        _connect(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=folder)
    except InputError:
        end()
        raise
    return end


def _knock(address: str) -> None:
    """Refuse an address that does not answer: Ray itself would try for minutes, and not at the loopback device."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "//" in host:
        raise InputError(f"a Ray address is host:port of the cluster's head, 'auto' or 'local', not {address!r}")
    host = ray.util.get_node_ip_address() if host in LOOPBACK else host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {error}; is it running, and this the port?") from None


def _connect(**options: Any) -> None:
    try:
        with _quietly():
            ray.init(**options, configure_logging=False, log_to_driver=False)
    except Exception as error:  # of many kinds, and all say that there is no cluster
        reason = " ".join(str(error).split())[:300]
        hint = "" if options["address"] == "local" else " (one that asks for a token needs RAY_AUTH_MODE=token here)"
        raise InputError(f"cannot use the Ray cluster at {options['address']!r}: {reason}{hint}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep Ray's remarks on how it starts off the terminal, and its handler of SIGTERM out of this process."""
    logger, here = logging.getLogger("ray"), threading.current_thread() is threading.main_thread()
    level, handler = logger.level, signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if here and handler is not None:
            signal.signal(signal.SIGTERM, handler)
