"""A small classification problem whose clients have test data of their own, and every personal method on it."""

from __future__ import annotations

from typing import Any

import torch
from helpers import blobs, draws, plain
from torch import Tensor, nn

import fedflat
from fedflat import Federation

SIZES = (6, 10, 14, 8, 12)
TESTS = 60
SMALL_NET = "embedding=3, hidden=6, depth=1"
METHODS = (
    "ditto(lam=0.5)",
    "pfedme(lam=2.0, steps=2, lr=0.1)",
    "fedrep(head_epochs=2)",
    "fedper",
    "lg_fedavg",
    "fedbabu",
    "local_only",
    "finetune",
    "apfl",
    "apfl(mix='logits')",
    "lwsam(rho=0.1)",
    "plgu_lf(rho=0.1, layers=1)",
    "plgu_grep(rho=0.1)",
    f"plgu_ghn({SMALL_NET}, rho=0.1)",
    f"plgu_ghn({SMALL_NET}, rho=0.1, evaluate='local')",
    f"pfedhn({SMALL_NET})",
    f"pfedhn({SMALL_NET}, local_head=True)",
    "ifca(k=2)",
)
ADAPTED = ("fedbabu", "finetune", "ifca(k=2)")
"""Whose personal model is fitted for the evaluation and not kept."""
WITHOUT = ("lwsam(rho=0.1)",)
"""Which have no personal model."""


def labelled(count: int, client: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples of a client, shifted in a way of its own, with two of three labels."""
    x, y = blobs(3 * count, seed=seed)
    keep = (y != client % 3).nonzero().flatten()[:count]
    shift = torch.randn(4, generator=draws(50 + client), dtype=torch.float64)
    return x[keep] + shift, y[keep]


def own_test(client: int) -> tuple[Tensor, Tensor]:
    return labelled(TESTS, client, 500 + client)


def federation(sizes: tuple[int, ...] = SIZES, with_tests: bool = True) -> Federation:
    tests: list[Any] | None = [own_test(i) for i in range(len(sizes))] if with_tests else None
    return Federation([labelled(n, i, i) for i, n in enumerate(sizes)], test=blobs(30, seed=1000), client_tests=tests)


def go(method: str, model: nn.Module, data: Federation | None = None, **changes: Any) -> fedflat.Run:
    """Three rounds in which client 3 is never drawn and client 0 not in the last one."""
    names = ("out", "callbacks", "state_memory", "participants")
    given: dict[str, Any] = {"participants": lambda t: [(0, 1, 2), (1, 4), (2, 4)][t % 3]}
    given |= {name: changes.pop(name) for name in names if name in changes}
    fields: dict[str, Any] = {"rounds": 3, "lr": 0.3, "local_epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
    e = plain(method=method, **(fields | changes))
    return fedflat.run(e, federation=data or federation(), model=model, progress=False, **given)


def accuracy(module: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    x, y = samples
    with torch.no_grad():
        return float((module(x.to(next(module.parameters()).dtype)).argmax(1) == y).double().mean())
