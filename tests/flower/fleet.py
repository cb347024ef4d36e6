"""A SuperLink and SuperNodes of Flower as processes of their own, on this machine, with TLS and authentication."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers import TESTS

from fedflat import Experiment
from fedflat.flower.project import write_project

PROGRAMS = Path(sys.executable).parent
PATIENCE = 240.0  # seconds for anything that is waited for; on an idle machine all of it takes about two minutes


class Fleet:
    """A project in a folder, and the processes that were started for it."""

    def __init__(self, folder: Path, experiment: Experiment, apps: str) -> None:
        self.folder, self.port = folder, free_port()
        write_project(folder, experiment)
        (folder / "federation.py").write_text(apps)
        config = folder / "flower" / "config.toml"
        config.write_text(config.read_text().replace(":8000", f":{self.port}"))
        programs = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])  # which start each other by name
        own = {"FLWR_HOME": str(folder / "flower"), "PYTHONPATH": str(TESTS.parent), "PATH": programs}
        self.environment = os.environ | own | {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, log: str, program: str, *words: object) -> subprocess.Popen[bytes]:
        """Start a program of Flower's in the project's folder."""
        command = [str(PROGRAMS / program), *map(str, words)]
        with (self.folder.parent / f"{log}.log").open("wb") as out:
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=out, stderr=out)
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder.parent / f"{name}.log").read_text(errors="replace")

    def superlink(self) -> None:
        tls = [f"--ssl-{kind}=keys/{file}" for kind, file in CERTIFICATES.items()]
        alone = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        process = self.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", self.port, *tls, *alone)
        wait_until(lambda: reachable(self.port) or process.poll() is not None, "the SuperLink to listen")
        assert process.poll() is None, self.log("superlink")

    def register(self, *clients: int) -> None:
        """Put the keys of these clients on the list of those that may join."""
        started = [
            self.start(f"key{n}", "flwr", "supernode", "register", f"keys/node-{n}.pub", "trial") for n in clients
        ]
        assert [process.wait(PATIENCE) for process in started] == [0] * len(clients)

    def supernode(self, client: int, key: str | None = None, extra: str = "") -> subprocess.Popen[bytes]:
        """A node for a client. key: its private key, the registered one by default."""
        words = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "keys/ca.pem"]
        words += ["--auth-supernode-private-key", key or f"keys/node-{client}", "--port", str(free_port())]
        words += ["--node-config", f'client={client} key="{key or f"keys/node-{client}"}" state="state" {extra}']
        return self.start(f"node{client}" if key is None else "intruder", "flower-supernode", *words)

    def online(self) -> int:
        """How many nodes the SuperLink takes to be there; those that were killed for a minute more."""
        command = [str(PROGRAMS / "flwr"), "supernode", "list", "trial", "--format", "json"]
        listed = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, check=True)
        return sum(node["status"] == "online" for node in json.loads(listed.stdout)["nodes"])

    def run(self) -> None:
        """Hand the apps in."""
        assert self.start("run", "flwr", "run", ".", "trial").wait(PATIENCE) == 0, self.log("run")

    def close(self) -> None:
        """End every process that belongs to the project, grandchildren included."""
        for process in self.processes:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(5)
        wait_until(self._ended, "the processes to end")

    def _ended(self) -> bool:
        """Kill what is left; two looks must find nothing, as a process that turns into another program has no name."""
        for pause in (1, 0):
            left = self.members()
            for identity in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(identity, signal.SIGKILL)
            if left or any(process.poll() is None for process in self.processes):
                return False
            time.sleep(pause)
        return True

    def members(self) -> list[int]:
        """Processes that know the project's folder as Flower's home (Linux)."""
        mark = f"FLWR_HOME={self.folder / 'flower'}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


CERTIFICATES = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}


@contextlib.contextmanager
def fleet(folder: Path, experiment: Experiment, apps: str) -> Iterator[Fleet]:
    """A fleet whose processes end with the block."""
    made = Fleet(folder, experiment, apps)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
