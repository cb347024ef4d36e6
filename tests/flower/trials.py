"""Small federations behind Flower's wire, and the same ones simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import blobs, plain, same, timeless
from torch import nn

import fedflat
from fedflat import Experiment, Federation, Run
from fedflat.core.tensors import nest
from fedflat.flower import client_app, server_app
from fedflat.runs.files import read_tensors

from .loopback import Loopback, start

SIZES = (6, 10, 14, 8)


def federation() -> Federation:
    """Clients of several sizes, all but the last with test data of their own."""
    tests = [blobs(9, seed=100 + i) for i in range(len(SIZES) - 1)]
    return Federation(
        [blobs(n, seed=i) for i, n in enumerate(SIZES)], test=blobs(30, seed=1000), client_tests=[*tests, None]
    )


def trial(method: str = "fedavg", **changes: Any) -> Experiment:
    usual: dict[str, Any] = {"rounds": 4, "participation": "uniform(3)", "lr": 0.1, "model": "logistic"}
    return plain(**usual | {"method": method, "clients": len(SIZES)} | changes)


def deployed(
    folder: Path, experiment: Experiment, tamper: Any = None, *, own: nn.Module | None = None, **options: Any
) -> tuple[Run, Loopback]:
    """Run an experiment with all of its clients behind Flower's wire."""
    held = federation()
    grid = Loopback(client_app(experiment, data=held, model=own, state=folder / "state"), range(len(SIZES)), tamper)
    options = {"timeout": 0.05, "wait": 0.5} | options
    start(server_app(experiment, test=held, model=own, out=folder / "run", **options), grid)
    return fedflat.load_run(folder / "run", model=own), grid


def simulated(experiment: Experiment, own: nn.Module | None = None, **options: Any) -> Run:
    return fedflat.run(experiment, federation=federation(), model=own, **options)


def kept_by(folder: Path, client: int) -> dict[str, Any]:
    """What a client keeps on its disk: the newest of its files."""
    files = sorted(folder.glob(f"state/*/{client}/*/*.safetensors"), key=lambda path: int(path.suffixes[-2][1:]))
    return nest(read_tensors(files[-1])) if files else {}


def assert_same(here: Run, there: Run) -> None:
    """The server's part of two runs, to the last bit."""
    assert same(here.server_weights, there.server_weights)
    assert same(here.weights, there.weights)
    assert same(here.model.state_dict(), there.model.state_dict())
    assert same(here.server_state, there.server_state)
    assert timeless(here.metrics) == timeless(there.metrics)
    assert timeless(here.clients) == timeless(there.clients)
    assert timeless(here.evaluations) == timeless(there.evaluations)
