"""pFedHN and PLGU-GHN: a network on the server makes the clients' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import plain
from torch import Tensor, nn

import fedflat
from fedflat import Federation
from fedflat.runs.result import Run
from parts.conformance.harness import assert_close, run_library
from parts.conformance.reference import Array, World
from parts.personal.simulation import (
    BODY,
    NET,
    PLAIN,
    Ascent,
    Hyper,
    flat,
    hard_world,
    hypernetwork,
    train,
    twin,
    world_of,
)

SIZES = (15, 5, 10, 2)  # of the network's tensors
SHAPE = "embedding=3, hidden=6"
SERVER: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "decay": 0.01, "clip": 50.0}


def text(part: str, depth: int = 1, **fields: Any) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in (SERVER | fields).items())
    return f"{part}({SHAPE}, depth={depth}, {given})"


def phi(run: Run, part: str = "pfedhn") -> Tensor:
    return run.server_state[part]["phi"]


def first_network(world: World, depth: int = 1, chunk: int = 0, sizes: tuple[int, ...] = SIZES, **fields: Any) -> Hyper:
    """The network with which the library starts: the one it still has after a round without a learning rate."""
    still = text("pfedhn", depth, **({"lr": 0.0, "chunk": chunk} | fields))
    run = run_library(world.but(participants=world.participants[:1]), still)
    network = Hyper(world.clients, sizes, embedding=3, hidden=6, depth=depth, chunk=chunk)
    weights = phi(run)
    assert weights.shape == flat(network).shape
    nn.utils.vector_to_parameters(weights.clone(), network.parameters())
    return network


def local_sgd(world: World) -> Any:
    return lambda t, i, w: train(world, t, i, w)


def assert_agrees(run: Run, expected: Any, part: str = "pfedhn", clients: int = 4) -> None:
    assert_close(phi(run, part), expected.extra["phi"])
    for i in range(clients):
        assert_close(flat(run.personal(i)), expected.own[i])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("world", [world_of(PLAIN), hard_world()], ids=["plain", "hard"])
def test_pfedhns_server_descends_on_the_distance_to_what_the_clients_made(world: World, depth: int) -> None:
    """Gradient of ½‖h(v_i) − θ̃_i‖², by autograd; clip, momentum, decay; some take part."""
    expected = hypernetwork(world, first_network(world, depth), local_sgd(world), **SERVER)
    assert_agrees(run_library(world, text("pfedhn", depth)), expected)


def test_pfedhns_gradient_is_clipped() -> None:
    world, server = world_of(PLAIN), SERVER | {"clip": 0.05}
    expected = hypernetwork(world, first_network(world), local_sgd(world), **server)
    run = run_library(world, text("pfedhn", clip=0.05))
    assert float((phi(run) - phi(run_library(world, text("pfedhn")))).norm()) > 1e-3  # it was larger
    assert float((phi(run) - expected.extra["phi"]).norm() / phi(run).norm()) < 1e-7  # torch clips a millionth lower


def test_pfedhn_in_chunks_shares_one_output_layer_between_the_pieces() -> None:
    """A common network on [v_i; chunk embedding]; the last of five pieces of seven is cut to 32 weights."""
    world = world_of(PLAIN)
    expected = hypernetwork(world, first_network(world, chunk=7), local_sgd(world), **SERVER)
    assert_agrees(run_library(world, text("pfedhn", chunk=7)), expected)


def test_pfedhn_with_a_local_head_generates_the_body_only() -> None:
    world = world_of(PLAIN)
    network = first_network(world, sizes=SIZES[:2], local_head=True)
    expected = hypernetwork(world, network, local_sgd(world), made=BODY, **SERVER)
    run = run_library(world, text("pfedhn", local_head=True))
    assert_agrees(run, expected)
    row = run.metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (BODY.sum(), BODY.sum())


def test_pfedhn_sends_one_model_down_and_one_up() -> None:
    row = run_library(world_of(PLAIN), text("pfedhn")).metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)


@pytest.mark.parametrize("part", ["pfedhn", "plgu_ghn"])
def test_unchanged_models_teach_nothing(part: str) -> None:
    """θ̃ = θ ⇒ zero gradient; without decay the network stays bit for bit."""
    world = hard_world(steps=0)
    run = run_library(world, text(part, decay=0.0))
    assert torch.equal(phi(run, part), flat(first_network(world)))


def test_embeddings_of_absent_clients_stay_bit_for_bit() -> None:
    """Dense embeddings with momentum and decay would move them."""
    world = hard_world(participants=((0, 1), (0, 2), (2,)))
    start = first_network(world).embedding.weight.detach()
    before = phi(run_library(world.but(participants=((0, 1),)), text("pfedhn")))[:12].view(4, 3)
    end = phi(run_library(world, text("pfedhn")))[:12].view(4, 3)
    assert torch.equal(end[3], start[3])  # never took part
    assert torch.equal(end[1], before[1])  # in the first round only
    assert not torch.equal(end[0], before[0])


def test_sequential_steps_of_a_single_client_are_those_of_the_mean() -> None:
    world = hard_world(participants=((2,), (0,), (2,)))
    one, other = (run_library(world, text("pfedhn", sequential=s)) for s in (False, True))
    assert_close(phi(one), phi(other), 1e-13)


def test_sequential_takes_one_step_a_client() -> None:
    """With a clip that always acts and nothing else, the network cannot move farther than lr · clip a step."""
    world, server = hard_world(participants=((0, 1, 2, 3),)), {"lr": 0.1, "clip": 1e-3, "momentum": 0.0, "decay": 0.0}
    start = flat(first_network(world))
    runs = [run_library(world, text("pfedhn", sequential=s, **server)) for s in (False, True)]
    once, often = (float((phi(run) - start).norm()) for run in runs)
    assert once == pytest.approx(1e-4, rel=1e-3)
    assert 1e-4 < often <= 4.01e-4


# ---- sizes ----


def cnn() -> nn.Module:
    """The target network of the paper's CIFAR experiments, 121 182 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def images(clients: int, shape: tuple[int, ...]) -> Federation:
    return Federation([(torch.zeros(1, *shape), torch.tensor([i % 10])) for i in range(clients)], classes=10)


def test_the_papers_hypernetwork_has_12_271_732_weights() -> None:
    module = cnn()
    assert sum(p.numel() for p in module.parameters()) == 121_182
    e = plain(method="pfedhn", dtype="float32", participation="uniform(1)", evaluate_every=0)
    run = fedflat.run(e, federation=images(50, (3, 32, 32)), model=module, progress=False)
    assert phi(run).numel() == 12_271_732


def test_a_target_above_a_million_weights_is_made_in_chunks() -> None:
    """One output layer a tensor would take 101 weights for each of the target's."""
    target = nn.Sequential(nn.Flatten(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    e = plain(method="pfedhn", dtype="float32", participation="uniform(1)", evaluate_every=0)
    run = fedflat.run(e, federation=images(4, (1000,)), model=target, progress=False)
    assert phi(run).numel() < 1_010_000
    assert run.server_weights.isfinite().all()


def test_the_embedding_has_one_plus_a_quarter_of_the_clients_entries() -> None:
    module = nn.Linear(2, 10)
    e = plain(method="pfedhn(hidden=7, depth=0)", dtype="float32")
    data = Federation([(torch.zeros(1, 2), torch.tensor([0])) for _ in range(10)], classes=10)
    run = fedflat.run(e, federation=data, model=module, progress=False)
    entries = 3  # int(1 + 10/4)
    assert phi(run).numel() == 10 * entries + (entries + 1) * 7 + (7 + 1) * 30


# ---- PLGU-GHN ----


@pytest.mark.parametrize("depth", [0, 2])
def test_plgu_ghn_without_a_radius_is_pfedhn(depth: int) -> None:
    world = hard_world()
    left, right = run_library(world, text("plgu_ghn", depth, rho=0.0)), run_library(world, text("pfedhn", depth))
    assert torch.equal(phi(left, "plgu_ghn"), phi(right))
    assert torch.equal(left.weights, right.weights)


def test_plgu_ghns_trunk_has_three_linear_layers() -> None:
    world = world_of(PLAIN)
    run = run_library(world, "plgu_ghn(embedding=3, hidden=6)")
    assert phi(run, "plgu_ghn").numel() == flat(Hyper(4, SIZES, 3, 6, depth=2)).numel()


@pytest.mark.parametrize(
    ("fields", "ascent"),
    [({}, Ascent()), ({"score": "mean", "score_dim_power": 0.5}, Ascent(norm="mean", kappa=0.5))],
    ids=["sum", "mean"],
)
def test_plgu_ghn_agrees_with_the_formulas(fields: dict[str, Any], ascent: Ascent) -> None:
    """The generalised trajectory teaches the network, the plain one stays and makes the next scores."""
    world, own = world_of(PLAIN), dict[int, Array]()

    def train_client(t: int, i: int, w: Array) -> Array:
        xi = ascent.scores(own.get(i, w), w)
        own[i], w = twin(world, t, i, w, w, xi, ascent)
        return w

    expected = hypernetwork(world, first_network(world), train_client, **SERVER)
    run = run_library(world, text("plgu_ghn", rho=0.2, **fields))
    assert_agrees(run, expected, "plgu_ghn")
    local = run_library(world, text("plgu_ghn", rho=0.2, evaluate="local", **fields))
    for i, plain_model in own.items():
        assert_close(flat(local.personal(i)), plain_model)
    row = run.metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (NET.size, NET.size)
