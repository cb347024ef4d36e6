"""Flower's own simulation as an engine of `engines.py`; in a module of its own because Flower's workers import it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.simulation import run_simulation
from speed import CLIENTS, WORKERS, Fedflat
from stopwatch import watch

import fedflat
from fedflat.flower import client_app, server_app

SERVER = {
    "server's messages": [
        "fedflat.flower.backend:common",
        "fedflat.flower.backend:Flower._send",
        "fedflat.flower.backend:read_reply",
        "fedflat.flower.transport:Transport.pull",
    ]
}
CLIENT = {
    "making of setups": ["fedflat.flower.client_app:Client._setup"],
    "clients' messages": ["fedflat.flower.client_app:received", "fedflat.flower.client_app:reply"],
}
RESOURCES = {"init_args": {"num_cpus": WORKERS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


@contextlib.contextmanager
def flower(contender: Fedflat) -> Iterator[tuple[Callable[..., None], Callable[[], dict[str, float]]]]:
    """How to run an experiment, and what has been spent so far: by the server, and by the workers, shared by them."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    here = watch(SERVER)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spent").mkdir()

        def run(experiment: fedflat.Experiment, callback: fedflat.Callback) -> None:
            model = experiment.model
            app = client_app(experiment, data=lambda context: federation(model), state=folder / "state")
            server = server_app(experiment, callbacks=[callback])
            run_simulation(server, Watched(app, folder / "spent"), CLIENTS, backend_config=RESOURCES)

        def spent() -> dict[str, float]:
            workers = [json.loads(path.read_text()) for path in (folder / "spent").iterdir()]
            return here | {name: sum(worker[name] for worker in workers) / WORKERS for name in CLIENT}

        yield run, spent


@cache
def federation(model: str) -> fedflat.Federation:
    """The clients' data, made once in every worker."""
    return Fedflat(model).federation


@cache
def watched() -> dict[str, float]:
    """What this worker has spent."""
    return watch(CLIENT)


class Watched(ClientApp):
    """An app that writes down what its worker has spent so far."""

    def __init__(self, app: ClientApp, folder: Path) -> None:
        super().__init__()
        self.app, self.folder = app, folder

    def __call__(self, message: Any, context: Any) -> Any:
        """Answer a message."""
        spent = watched()
        answer = self.app(message, context)
        (self.folder / str(os.getpid())).write_text(json.dumps(spent))
        return answer
