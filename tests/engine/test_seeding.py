"""The global generators are seeded for every client whose network or data draw from them, and for no other."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat import Experiment, Federation
from fedflat.core import streams
from fedflat.engine import jobs
from fedflat.runs.runner import run

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}


class Noisy(nn.Module):
    """Adds noise, but only to samples of some clients."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        noise = self.draw() if self.draw is not None and float(x[0, 0]) > 0 else 0.0
        return self.linear(x + noise)


def trained(draw: Callable[[], float] | None, backend: str, workers: int | None = None) -> Tensor:
    source = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    clients = [(torch.randn(6, 4, generator=source), torch.randint(3, (6,), generator=source)) for _ in range(12)]
    for i, (x, _) in enumerate(clients):
        x[:, 0] = 1.0 if i % 5 == 4 else -1.0
    experiment = Experiment(rounds=2, participation="all", batch_size=3, lr=0.1, backend=backend, workers=workers)
    return run(experiment, federation=Federation(clients, classes=3), model=Noisy(draw), progress=False).weights


@pytest.mark.parametrize("kind", DRAWS)
def test_rare_draws_come_from_the_clients_own_seeds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only every fifth client draws. All back ends agree with seeding every client whether it draws or not."""
    found = [trained(DRAWS[kind], "serial"), trained(DRAWS[kind], "pool", 1), trained(DRAWS[kind], "pool", 2)]
    monkeypatch.setattr(jobs, "_unseeded", lambda *_: [])
    seeded = trained(DRAWS[kind], "serial")
    assert all(weights.equal(seeded) for weights in found)
    assert not seeded.equal(trained(None, "serial"))


def test_nothing_is_seeded_where_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    purposes = list[str]()
    seed = streams.seed_global

    def noted(number: int, purpose: str, *ids: int) -> None:
        purposes.append(purpose)
        seed(number, purpose, *ids)

    monkeypatch.setattr(streams, "seed_global", noted)
    trained(None, "serial")
    assert "model" not in purposes
    trained(DRAWS["python"], "serial")
    assert "model" in purposes
