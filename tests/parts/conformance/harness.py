"""The library's side of the comparison: the same `World` as an experiment, and small problems to build on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat import Callback, Experiment, Federation
from fedflat.core import streams
from fedflat.runs.result import Run
from fedflat.runs.runner import run

from .reference import Array, Linear, Mlp, Result, World

CLOSE = 1e-10


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """½ · mean over the batch of ‖output − y‖²."""
    return 0.5 * ((output - y) ** 2).sum(1).mean()


def orders(seed: int, sizes: Sequence[int]) -> Callable[[int, int], Iterator[Array]]:
    """The library's documented order of samples: one permutation an epoch from the stream of (round, client)."""

    def order(t: int, i: int) -> Iterator[Array]:
        stream = streams.stream(seed, "batches", t + 1, i)
        while True:
            yield stream.permutation(sizes[i]).numpy()

    return order


FULL = ((0, 1, 2, 3),) * 4
PARTIAL = ((0, 2), (3, 1, 2), (0, 3), (1, 0), (2, 0))
"""Client 3 pauses, client 0 comes back after one and two rounds, the number of participants varies."""
EQUAL, UNEQUAL = (6, 6, 6, 6), (4, 9, 5, 7)


def make_world(net: Linear | Mlp | None = None, sizes: Sequence[int] = EQUAL, seed: int = 0, **changes: Any) -> World:
    """Clients whose least-squares problems differ in curvature and in optimum."""
    net = net or Linear(4, 2)
    rng = np.random.default_rng(seed + 17)
    data = []
    for n in sizes:
        x = rng.normal(size=(n, net.inputs)) * rng.uniform(0.5, 1.5, net.inputs) + 0.3
        data.append((x, rng.normal(size=(n, net.outputs)) + rng.normal(size=net.outputs)))
    start = rng.normal(size=net.size) * 0.7
    if isinstance(net, Mlp):  # hidden units that live, so that no feature vector is zero
        start[net.hidden * net.inputs : net.layers[0].size] = 1.0
    settings = {"participants": FULL, "steps": 3} | changes
    return World(net=net, data=data, start=start, order=orders(seed, sizes), seed=seed, **settings)


REGIMES: dict[str, dict[str, Any]] = {
    "full batch, everyone": {},
    "minibatches, unequal sizes, some take part, lr decays": {
        "sizes": UNEQUAL,
        "participants": PARTIAL,
        "steps": None,
        "epochs": 2,
        "batch": 3,
        "lr_decay": 0.9,
    },
    "momentum, weight decay": {"momentum": 0.9, "weight_decay": 0.05, "lr": 0.05},
    "Nesterov, weight decay, clip, unequal sizes, some take part": {
        "sizes": UNEQUAL,
        "participants": PARTIAL,
        "momentum": 0.8,
        "nesterov": True,
        "weight_decay": 0.03,
        "clip": 1.5,
        "lr_decay": 0.95,
        "batch": 4,
        "steps": 5,
    },
}


def module_of(world: World) -> nn.Module:
    """A torch module with the world's starting weights."""
    net = world.net
    if isinstance(net, Mlp):
        module: nn.Module = nn.Sequential(
            nn.Linear(net.inputs, net.hidden), nn.ReLU(), nn.Linear(net.hidden, net.outputs)
        )
    else:
        module = nn.Linear(net.inputs, net.outputs)
    return with_weights(module, world.start)


def with_weights(module: nn.Module, weights: Array | Tensor) -> nn.Module:
    module = module.double()
    nn.utils.vector_to_parameters(torch.as_tensor(weights).double().clone(), module.parameters())
    return module


def federation_of(world: World) -> Federation:
    return Federation([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in world.data], classes=1)


def experiment_of(world: World, method: str, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "method": method,
        "rounds": len(world.participants),
        "local_steps": world.steps,
        "local_epochs": world.epochs,
        "batch_size": world.batch,
        "lr": world.lr,
        "lr_decay": world.lr_decay,
        "momentum": world.momentum,
        "nesterov": world.nesterov,
        "weight_decay": world.weight_decay,
        "clip": world.clip,
        "server_lr": world.server_lr,
        "seed": world.seed,
        "dtype": "float64",
        "backend": "serial",
    }
    return Experiment(**(settings | changes))


def run_library(
    world: World,
    method: str,
    *,
    module: nn.Module | None = None,
    loss: Callable[[Any, Tensor], Tensor] = squared_error,
    out: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Run the library in this world."""
    return run(
        experiment_of(world, method, **changes),
        federation=federation_of(world),
        model=module or module_of(world),
        loss=loss,
        participants=lambda t: world.participants[t],
        out=out,
        progress=False,
        callbacks=callbacks,
    )


def weights_of(run: Run) -> Array:
    """The weights that the server would send next."""
    return run.server_weights.numpy()


class Trajectory(Callback):
    """The server's weights before the first round and after every round."""

    def __init__(self) -> None:
        self.points: list[Array] = []

    def start(self, run: Run) -> None:
        self.points.append(weights_of(run))

    def round(self, run: Run, metrics: Any) -> None:
        self.points.append(weights_of(run))

    @property
    def moves(self) -> list[Array]:
        return [after - before for before, after in pairwise(self.points)]


class StopAfter(Callback):
    """Stop the run after a round."""

    def __init__(self, last: int) -> None:
        self.last = last

    def round(self, run: Run, metrics: Any) -> bool:
        return metrics["round"] >= self.last


def distance(got: Array | Tensor, expected: Array | Tensor) -> float:
    """‖got − expected‖ relative to ‖expected‖."""
    got, expected = np.asarray(got, dtype=float).ravel(), np.asarray(expected, dtype=float).ravel()
    assert got.shape == expected.shape
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(got - expected) / (scale or 1.0))


def assert_close(got: Array | Tensor, expected: Array | Tensor, tolerance: float = CLOSE) -> None:
    assert distance(got, expected) <= tolerance


def assert_agrees(run: Run, result: Result, part: str) -> None:
    """Weights and all that server and clients keep for `part` agree with the reference."""
    assert_close(run.server_weights, result.w)
    for name, value in result.server.items():
        assert distance(run.server_state[part][name], value) <= CLOSE, f"server's {name}"
    for i, values in result.client.items():
        for name, value in values.items():
            assert distance(run.client_state(i)[part][name], value) <= CLOSE, f"client {i}'s {name}"


def assert_same_bits(left: Run, right: Run) -> None:
    """Weights and every state of two runs are equal bit for bit."""
    assert torch.equal(left.weights, right.weights)
    assert torch.equal(left.server_weights, right.server_weights)
    assert_same_states(left.server_state, right.server_state)
    for i in {row["client"] for row in (*left.clients, *right.clients)}:
        assert_same_states(left.client_state(i), right.client_state(i))


def assert_same_states(left: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> None:
    assert left.keys() == right.keys()
    for part in left:
        assert left[part].keys() == right[part].keys()
        for name in left[part]:
            assert torch.equal(left[part][name], right[part][name]), f"{part}: {name}"
