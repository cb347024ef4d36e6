"""Join a running Ray cluster, or start one on this machine and end it afterwards."""

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

from fedflat.core.processes import available_cores
from fedflat.errors import InputError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SECONDS = 5.0  # to wait for a connection to a cluster


class Session:
    """This process's connection to a cluster. A process that is already connected stays connected.

    Args:
        address: "host:port" of a cluster, "auto" for the cluster of this machine, or "local" to start one that ends
            with the session. None: $RAY_ADDRESS, otherwise "local".
        cpus: Number of CPUs of a cluster that is started; None: all available ones.
    """

    def __init__(self, address: str | None, cpus: int | None) -> None:
        self.open = True
        self._leave = _stay if ray.is_initialized() else _join(address or os.environ.get("RAY_ADDRESS", "local"), cpus)
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        self.gpus = float(ray.cluster_resources().get("GPU", 0))
        if self.cpus < 1:
            self.close()
            raise InputError("the Ray cluster has no CPUs for workers: start a node with `ray start --num-cpus`")

    def close(self) -> None:
        """Disconnect, and end the cluster if it was started here."""
        self.open = False
        self._leave()


def _stay() -> None:
    pass


def _join(address: str, cpus: int | None) -> Callable[[], None]:
    """Connect; returns a function that disconnects."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # lost values are made again, with our own message
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
    """Refuse an address that does not answer. Ray itself would try for minutes, and not on the loopback device."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "//" in host:
        raise InputError(f"a Ray address is host:port of the cluster's head, 'auto' or 'local', not {address!r}")
    host = ray.util.get_node_ip_address() if host in LOOPBACK else host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster answers at {address}: {error}; is it running, and is the port right?"
        ) from None


def _connect(**options: Any) -> None:
    try:
        with _quietly():
            ray.init(**options, configure_logging=False, log_to_driver=False)
    except Exception as error:  # of many kinds; all mean that there is no usable cluster
        reason = " ".join(str(error).split())[:300]
        hint = "" if options["address"] == "local" else " (one that asks for a token needs RAY_AUTH_MODE=token here)"
        raise InputError(f"cannot use the Ray cluster at {options['address']!r}: {reason}{hint}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress Ray's start-up messages, and restore this process's handler of SIGTERM."""
    logger, here = logging.getLogger("ray"), threading.current_thread() is threading.main_thread()
    level, handler = logger.level, signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if here and handler is not None:
            signal.signal(signal.SIGTERM, handler)
