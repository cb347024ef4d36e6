"""Small worlds for the tests: data, networks, a part that keeps state everywhere, and exact comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedflat
from fedflat import Experiment, Federation, Local, Part, Server
from fedflat.core import streams

assert callable(fedflat.run)  # before anything imports the module of the same name
TESTS = Path(__file__).parent
DEFENCES = [  # as they are set against two attackers of ten clients
    "median",
    "trimmed_mean(beta=0.2)",
    "krum(attackers=2)",
    "multikrum(attackers=2)",
    "centred_clipping(tau=1.0)",
    "norm_bound(limit=1.0)",
    "norm_bound(quantile=0.5)",
    "centred_clipping(quantile=0.5)",
    "geometric_median",
    "bucketing(s=2)+median",
    "nnm(attackers=2)+trimmed_mean(beta=0.2)",
]


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int, features: int = 4, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples around one centre a class, in float64, every class present where there is room."""
    source = draws(seed)
    y = torch.arange(count) % classes
    centres = torch.randn(classes, features, generator=draws(99), dtype=torch.float64)
    return centres[y] + 0.7 * torch.randn(count, features, generator=source, dtype=torch.float64), y


def world(sizes: tuple[int, ...] = (6, 10, 14), **options: Any) -> Federation:
    return Federation([blobs(n, seed=i) for i, n in enumerate(sizes)], test=blobs(30, seed=1000), **options)


def plain(**changes: Any) -> Experiment:
    """SGD and nothing else, in double precision, everything in this process."""
    quiet = {"lr_decay": 1.0, "weight_decay": 0.0, "clip": None, "participation": "all", "local_epochs": 1}
    here = {"backend": "serial", "dtype": "float64", "rounds": 1, "batch_size": 4}
    return Experiment(**(quiet | here | changes))


def network(features: int = 4, classes: int = 3) -> nn.Module:
    with streams.isolated(0, "tests"):
        return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, classes)).double()


def restless(features: int = 4, classes: int = 3) -> nn.Module:
    """A network with running statistics and with draws of its own."""
    with streams.isolated(0, "tests"):
        return nn.Sequential(
            nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, classes)
        )


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


@dataclass(frozen=True)
class Diary(Part):
    """Keeps, sends and broadcasts something of every kind, and lets all of it change the training."""

    pull: float = 0.05

    def begin(self, local: Local) -> None:
        local.state(self).setdefault("drift", torch.zeros_like(local.theta))

    def correct_gradient(self, local: Local) -> None:
        local.grad.add_(local.theta - local.received(self)["centre"], alpha=self.pull)
        local.grad.add_(local.state(self)["drift"], alpha=self.pull)

    def end(self, local: Local) -> None:
        state, now = local.state(self), local.theta.new_tensor([local.round], dtype=torch.int32)
        state["drift"] = state["drift"] + (local.theta - local.origin)
        state["rounds_seen"] = state.get("rounds_seen", torch.tensor(0)) + 1
        state["rounds"] = torch.cat([state["rounds"], now]) if "rounds" in state else now
        state["short"] = local.theta.bfloat16().view(1, -1)
        state["flag"] = torch.tensor(local.round % 2 == 0)
        state["nothing"] = torch.empty(0, 3, dtype=torch.uint8)
        heard = torch.nn.functional.one_hot(torch.tensor(local.client), local.clients)
        local.send(self, drift=state["drift"], heard=heard, one=torch.tensor(1.0, dtype=torch.float64))

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        kept = server.state(self)
        return {"centre": kept.get("centre", torch.zeros_like(server.theta)), "round": torch.tensor(server.round)}

    def end_round(self, server: Server) -> None:
        kept, total = server.state(self), server.total(self)
        kept["centre"] = server.theta + 0.01 * total["drift"]
        kept["heard"] = kept.get("heard", 0) + total["heard"]
        kept["messages"] = kept.get("messages", 0) + total["one"]


fedflat.register(Diary)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, through nested dictionaries."""
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table without what a clock put there."""
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in rows]


def assert_same_run(a: fedflat.Run, b: fedflat.Run, clients: int) -> None:
    assert same(a.server_weights, b.server_weights)
    assert same(a.weights, b.weights)
    assert same(a.model.state_dict(), b.model.state_dict())
    assert same(a.server_state, b.server_state)
    assert all(same(a.client_state(i), b.client_state(i)) for i in range(clients))
    assert timeless(a.metrics) == timeless(b.metrics)
    assert timeless(a.clients) == timeless(b.clients)


def start_python(script: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """A Python process of its own that runs `script` and can import this module."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **(pipes | options))


def run_python(script: str, *arguments: str | Path) -> str:
    """What `script` prints; its errors are the test's errors."""
    process = start_python(script, *arguments)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def members(session: int) -> list[int]:
    """Processes of a session that still run (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found
