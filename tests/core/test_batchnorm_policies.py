"""What of BatchNorm is shared, what stays with the client, and what the evaluated model normalises with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_run, blobs, draws, network, plain, same, world
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Experiment, Federation, InputError, load_run
from fedflat.core.streams import Stream, isolated, stream
from fedflat.models import build_model

POLICIES = ("average", "local", "silobn", "recompute")
SIZES = (8, 12, 7)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def normed() -> nn.Module:
    """Two BatchNorm layers, one of them called by a name without "bn" or "norm"."""
    with isolated(0, "tests"):
        first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        return nn.Sequential(first, nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def settings(**changes: Any) -> Experiment:
    return plain(**({"rounds": 3, "lr": 0.2, "local_epochs": 2} | changes))


def go(model: nn.Module | None = None, federation: Federation | None = None, **changes: Any) -> fedflat.Run:
    out, calls = changes.pop("out", None), changes.pop("callbacks", ())
    return fedflat.run(
        settings(**changes),
        federation=federation or world(SIZES),
        model=model or normed(),
        out=out,
        callbacks=calls,
        progress=False,
    )


def statistics(state: dict[str, Tensor]) -> list[str]:
    return [name for name in state if name.endswith(STATISTICS)]


def normalisations(state: dict[str, Tensor]) -> list[str]:
    """Names of all that belongs to BatchNorm layers."""
    layers = {name.removesuffix(".running_mean") for name in state if name.endswith("running_mean")}
    return [name for name in state if name.rpartition(".")[0] in layers]


def simulate(policy: str, e: Experiment, sizes: tuple[int, ...] = SIZES) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The federation by hand: what the server holds at the end, and what each client keeps to itself."""
    data, net = [blobs(n, seed=i) for i, n in enumerate(sizes)], normed()
    server = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    private = statistics(server) if policy == "silobn" else normalisations(server)
    own = [{name: server[name].clone() for name in private} for _ in sizes]
    for t in range(1, e.rounds + 1):
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items() if name not in private}
        for i, (x, y) in enumerate(data):
            net.load_state_dict(server | own[i])
            train(net, x, y, e, stream(e.seed, "batches", t, i))
            state = net.state_dict()
            own[i] = {name: state[name].clone() for name in private}
            for name, tensor in total.items():
                tensor += len(y) / sum(sizes) * state[name]
        server |= total
    return server, own


def train(net: nn.Module, x: Tensor, y: Tensor, e: Experiment, order: Stream) -> None:
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=e.lr)
    for _ in range(e.local_epochs):
        for at in order.permutation(len(y)).split(e.batch_size):
            optimiser.zero_grad()
            F.cross_entropy(net(x[at]), y[at]).backward()
            optimiser.step()


def flat(state: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(state[name].double().reshape(-1) for name in names)])


def parameters(state: dict[str, Tensor]) -> list[str]:
    return [name for name in state if not name.endswith(STATISTICS)]


# ---- what stays where ----


def test_averaging_is_the_default() -> None:
    assert Experiment().batchnorm == "average"
    assert_same_run(go(), go(batchnorm="average"), len(SIZES))


@pytest.mark.parametrize("policy", ["local", "silobn"])
def test_training_is_that_of_the_federation_by_hand(policy: str) -> None:
    """Each client goes on with its own tensors; the server averages the rest."""
    run = go(batchnorm=policy)
    server, own = simulate(policy, settings())
    shared = [name for name in parameters(server) if policy == "silobn" or name not in normalisations(server)]
    mine = dict(run.model.state_dict())
    torch.testing.assert_close(flat(mine, shared), flat(server, shared), rtol=1e-9, atol=1e-11)
    for i, expected in enumerate(own):
        (kept,) = run.client_state(i).values()
        floats = [name for name in expected if name.endswith(("running_mean", "running_var"))]
        torch.testing.assert_close(kept["buffers"], flat(expected, floats), rtol=1e-9, atol=1e-11)
        affine = [name for name in expected if name.endswith(("weight", "bias"))]
        torch.testing.assert_close(kept["theta"].double(), flat(expected, affine), rtol=1e-9, atol=1e-11)
        counts = [name for name in expected if name.endswith("num_batches_tracked")]
        assert kept["counters"].tolist() == flat(expected, counts).tolist()


def test_with_silobn_only_statistics_differ_between_clients() -> None:
    """γ and β are the server's for everybody, statistics nobody's but the client's."""
    states = [go(batchnorm="silobn").client_state(i)["private"] for i in range(3)]
    assert all(state["theta"].numel() == 0 for state in states)
    assert all(state["buffers"].numel() == 22 for state in states)
    assert not torch.equal(states[0]["buffers"], states[1]["buffers"])


def test_with_local_statistics_no_bit_of_a_client_comes_from_another() -> None:
    """A client's statistics after round 1 do not depend on the others' data."""
    other = Federation([blobs(8, seed=0), blobs(20, seed=77), blobs(10, seed=78)])
    for policy in ("local", "silobn"):
        left, right = go(batchnorm=policy, rounds=1), go(batchnorm=policy, rounds=1, federation=other)
        assert same(left.client_state(0), right.client_state(0))
        assert not same(left.client_state(1), right.client_state(1))


def test_a_client_that_pauses_keeps_its_own() -> None:
    """Client 2 takes part in the first round only."""
    for policy in ("local", "silobn"):
        runs = [
            fedflat.run(
                settings(batchnorm=policy, rounds=rounds),
                federation=world(SIZES),
                model=normed(),
                participants=lambda t: [0, 1, 2] if t == 0 else [0, 1],
                progress=False,
            )
            for rounds in (1, 3)
        ]
        assert same(runs[0].client_state(2), runs[1].client_state(2))
        assert not same(runs[0].client_state(0), runs[1].client_state(0))


def test_a_client_never_heard_keeps_nothing() -> None:
    run = fedflat.run(
        settings(batchnorm="silobn"), federation=world(SIZES), model=normed(), participants=lambda t: [0, 1]
    )
    assert run.client_state(2) == {}


def test_the_servers_own_normalisation_does_not_move_when_it_is_nobodys() -> None:
    start, end = normed().state_dict(), go(batchnorm="local").model.state_dict()
    for name in normalisations(dict(start)):
        if name.endswith(("weight", "bias")):
            assert torch.equal(end[name], start[name])


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "sam+swa(start=0.5, cycle=1)", "moon", "fedadam"])
def test_a_model_without_batchnorm_knows_no_policy(method: str) -> None:
    base = go(network(), method=method)
    for policy in POLICIES:
        run = go(network(), method=method, batchnorm=policy)
        assert torch.equal(run.weights, base.weights)
        assert torch.equal(run.server_weights, base.server_weights)
        assert [row["loss"] for row in run.metrics] == [row["loss"] for row in base.metrics]
        assert [row["floats_down"] for row in run.metrics] == [row["floats_down"] for row in base.metrics]


def test_groupnorm_is_shared_as_everything_else_is() -> None:
    with isolated(0, "tests"):
        module = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    runs = [go(module, batchnorm=policy) for policy in POLICIES]
    assert all(torch.equal(run.weights, runs[0].weights) for run in runs)


def test_layers_are_found_by_type_in_images_too() -> None:
    """ResNet-56's family: per layer of C channels 2C statistics stay, with FedBN another 2C weights."""
    x = torch.randn(6, 3, 8, 8, generator=draws(), dtype=torch.float64)
    federation = Federation([(x, torch.arange(6) % 3)])
    with isolated(0, "tests"):
        module = build_model("resnet56(blocks=1, width=4)", (3, 8, 8), 3)
    channels = sum(m.num_features for m in module.modules() if isinstance(m, nn.BatchNorm2d))
    for policy, weights in (("silobn", 0), ("local", 2 * channels)):
        kept = go(module, federation, batchnorm=policy, rounds=1).client_state(0)["private"]
        assert (kept["theta"].numel(), kept["buffers"].numel()) == (weights, 2 * channels)


# ---- messages ----


def test_messages_are_the_model_without_what_stays() -> None:
    weights, statistics_, affine = 4 * 6 + 6 + 6 * 5 + 5 + 5 * 3 + 3 + 22, 22, 22
    sizes = {"average": weights + statistics_, "recompute": weights + statistics_}
    sizes |= {"silobn": weights, "local": weights - affine}
    for policy, size in sizes.items():
        row = go(batchnorm=policy).metrics[-1]
        assert (row["floats_down"], row["floats_up"]) == (size, size), policy


# ---- evaluation with the statistics of the batch ----


def in_batches(module: nn.Module, x: Tensor, y: Tensor, size: int = 250) -> float:
    """Mean loss where every evaluation batch is normalised by itself."""
    net = copy.deepcopy(module).train()  # this net has no dropout: training mode only means batch statistics
    total = sum(
        F.cross_entropy(net(x[k : k + size]), y[k : k + size]).item() * len(y[k : k + size])
        for k in range(0, len(y), size)
    )
    return total / len(y)


@pytest.mark.parametrize("policy", ["local", "silobn"])
@pytest.mark.parametrize("count", [30, 300])
def test_the_common_test_set_is_judged_by_its_own_statistics(policy: str, count: int) -> None:
    test = blobs(count, seed=1000)
    federation = Federation([blobs(n, seed=i) for i, n in enumerate(SIZES)], test=test)
    run, net = go(batchnorm=policy, federation=federation), normed()
    nn.utils.vector_to_parameters(run.weights, net.parameters())
    assert run.metrics[-1]["loss"] == pytest.approx(in_batches(net, *test), rel=1e-10)


@pytest.mark.parametrize("policy", ["local", "silobn"])
def test_a_last_batch_of_one_sample_is_no_obstacle(policy: str) -> None:
    test = blobs(251, seed=1000)
    federation = Federation([blobs(n, seed=i) for i, n in enumerate(SIZES)], test=test)
    assert go(batchnorm=policy, federation=federation).metrics[-1]["loss"] > 0


@pytest.mark.parametrize("policy", ["local", "silobn"])
def test_a_single_sample_is_its_own_mean(policy: str) -> None:
    x, y = blobs(1, seed=1000)
    federation = Federation([blobs(n, seed=i) for i, n in enumerate(SIZES)], (x, y), [(x, y), None, blobs(9)])
    run, net = go(batchnorm=policy, federation=federation), normed()
    nn.utils.vector_to_parameters(run.weights, net.parameters())
    with torch.no_grad():
        twice = net.train()(torch.cat([x, x]))[:1]
    assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(twice, y).item(), rel=1e-10)
    assert run.evaluations[0]["common"] == float(twice.argmax() == y)


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_changes_nothing(policy: str) -> None:
    often, once = go(batchnorm=policy, evaluate_every=1), go(batchnorm=policy, evaluate_every=0)
    assert torch.equal(often.server_weights, once.server_weights)
    assert all(same(often.client_state(i), once.client_state(i)) for i in range(3))
    assert same(dict(often.model.state_dict()), dict(once.model.state_dict()))
    assert often.metrics[-1]["loss"] == once.metrics[-1]["loss"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_of_a_run_is_already_in_evaluation_mode(policy: str) -> None:
    """So that calling `eval` on it, as everybody does, changes nothing."""
    run, (x, _) = go(batchnorm=policy), blobs(30, seed=1000)
    assert torch.equal(run.model.eval()(x), run.model(x))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_of_a_run_is_not_changed_by_being_used(policy: str) -> None:
    run, (x, y) = go(batchnorm=policy), blobs(30, seed=1000)
    model = run.model
    before = copy.deepcopy(model.state_dict())
    first = model(x)
    assert torch.equal(model(x), first)
    assert same(dict(model.state_dict()), dict(before))
    assert F.cross_entropy(first, y).item() == pytest.approx(run.metrics[-1]["loss"], rel=1e-12)


# ---- statistics computed anew ----


def recomputed(net: nn.Module, sizes: tuple[int, ...], batch: int) -> Tensor:
    """Each client's plain mean over its batches in order, averaged by sample counts."""
    total = torch.zeros_like(flat(dict(net.state_dict()), floats(net)))
    for i, n in enumerate(sizes):
        fresh, (x, _) = copy.deepcopy(net).train(), blobs(n, seed=i)
        for module in fresh.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
                module.momentum = None
        with torch.no_grad():
            for at in torch.arange(n).split(batch):
                fresh(x[at])
        total += n / sum(sizes) * flat(dict(fresh.state_dict()), floats(fresh))
    return total


def floats(net: nn.Module) -> list[str]:
    return [name for name in net.state_dict() if name.endswith(("running_mean", "running_var"))]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("scaffold+sam", {}),
        ("swa(start=0.4, cycle=1)", {"rounds": 5}),
        ("fedavg", {"evaluated": "selected"}),
        ("feddyn", {"evaluated": "all"}),
    ],
)
def test_recomputed_statistics_are_those_of_the_evaluated_weights(method: str, changes: dict[str, Any]) -> None:
    run = go(method=method, batchnorm="recompute", **changes)
    net = normed()
    nn.utils.vector_to_parameters(run.weights, net.parameters())
    expected = recomputed(net, SIZES, settings().batch_size)
    mine = dict(run.model.state_dict())
    torch.testing.assert_close(flat(mine, floats(net)), expected, rtol=1e-9, atol=1e-11)
    net.load_state_dict(mine)
    x, y = blobs(30, seed=1000)
    assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(net.eval()(x), y).item(), rel=1e-9)


def test_recomputed_statistics_go_with_the_weights_they_were_made_for() -> None:
    """Not evaluated in the round of the stop, the model has the averaged statistics, and not those of old weights."""
    third = fedflat.TargetStopping("round", target=3)
    stopped = go(batchnorm="recompute", rounds=9, evaluate_every=2, callbacks=[third])
    assert same(dict(stopped.model.state_dict()), dict(go(batchnorm="average", rounds=3).model.state_dict()))
    tests = [blobs(20, seed=50 + i) for i in range(len(SIZES))]
    federation = Federation([blobs(n, seed=i) for i, n in enumerate(SIZES)], client_tests=tests)
    often, seldom = (
        go(batchnorm="recompute", federation=federation, evaluate_every=every, evaluate_clients=1) for every in (1, 3)
    )
    assert often.evaluations == seldom.evaluations


def test_recomputed_statistics_see_no_augmentation_and_no_dropout_of_the_streams() -> None:
    """Twice the same, though augmentation and dropout draw."""
    with isolated(0, "tests"):
        module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    left, right = go(module, batchnorm="recompute"), go(module, batchnorm="recompute", evaluate_every=0)
    assert same(dict(left.model.state_dict()), dict(right.model.state_dict()))


@pytest.mark.parametrize("method", ["fedavg", "scaffold+asam", "feddc+man", "swa(start=0.4, cycle=1)", "moon"])
def test_recomputing_leaves_the_training_alone(method: str) -> None:
    average, anew = (go(method=method, batchnorm=policy) for policy in ("average", "recompute"))
    assert torch.equal(average.server_weights, anew.server_weights)
    assert torch.equal(average.weights, anew.weights)
    assert all(same(average.client_state(i), anew.client_state(i)) for i in range(3))
    assert [row["loss"] for row in average.clients] == [row["loss"] for row in anew.clients]
    assert average.metrics[-1]["loss"] != anew.metrics[-1]["loss"]


# ---- everywhere ----


class Stop(fedflat.Callback):
    def round(self, run: fedflat.Run, metrics: Any) -> bool:
        return bool(metrics["round"] == 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits_on_every_back_end_after_a_stop_and_from_disk(policy: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"batchnorm": policy, "method": "scaffold+sam+swa(start=0.4, cycle=1)", "rounds": 4}
    changes |= {"participation": "uniform(2)"}
    whole = go(**changes)
    for workers in (1, 2):
        assert_same_run(go(**changes, backend="pool", workers=workers), whole, 3)
    go(**changes, out=tmp_path / "run", callbacks=[Stop()])
    assert_same_run(go(**changes, out=tmp_path / "run"), whole, 3)
    assert_same_run(load_run(tmp_path / "run", model=normed()), whole, 3)


def test_an_unknown_policy_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="silobn"):
        Experiment(batchnorm="silobm")
