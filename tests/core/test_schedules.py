"""Learning-rate schedules: closed forms of the learning rate of rounds and steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.errors import InputError

X = torch.ones(8, 1)


def rates(rounds: int, **fields: Any) -> tuple[list[float], float]:
    """The recorded learning rates, and how far plain descent on the loss −w moves in all."""
    fed = fedflat.Federation([(X, torch.zeros(8))], task="regression")
    usual = {"lr_decay": 0.5, "weight_decay": 0.0, "clip": None, "batch_size": 2, "local_epochs": 1, "dtype": "float64"}
    e = fedflat.Experiment(rounds=rounds, lr=1.0, participation="all", backend="serial", **usual | fields)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    run = fedflat.run(e, federation=fed, model=model, loss=lambda output, y: -output.mean())
    return [row["lr"] for row in run.metrics], float(run.weights)


def test_schedules_of_rounds() -> None:
    assert rates(3)[0] == [1.0, 0.5, 0.25]  # decay, with lr_decay
    assert rates(3, lr_schedule="constant")[0] == [1.0, 1.0, 1.0]
    assert rates(4, lr_schedule="cosine")[0] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    assert rates(4, lr_schedule="warmup(rounds=2)+decay")[0] == [0.5, 0.5, 0.25, 0.125]
    assert rates(2, lr_schedule="poly(power=2)")[0] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("poly(power=1)", [1 - i / 8 for i in range(8)]),  # two rounds of four steps, one straight line
        ("poly(power=1, horizon='round')", [1 - i / 4 for i in range(4)] * 2),
        ("poly(power=0.9, horizon='feddrive')", [(1 - i / 40_000) ** 0.9 for i in range(4)] * 2),
        ("constant", [1.0] * 8),
    ],
)
def test_schedules_of_steps(schedule: str, sizes: list[float]) -> None:
    assert rates(2, lr_schedule=schedule)[1] == pytest.approx(sum(sizes), rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "hint"), [("cosin", "cosine"), ("poly(power='a')", "power"), ("warmup(0)", "rounds")]
)
def test_a_schedule_that_does_not_exist(wrong: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        rates(1, lr_schedule=wrong)
