"""Stacked clients: the same results as client by client, up to rounding, for every part that stacks."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import Experiment, Federation, Method
from fedflat.core.part import can_stack
from fedflat.core.stacked import StackedModel
from fedflat.data.samples import TensorSamples
from fedflat.engine import evaluation
from fedflat.engine.stacking import dealt
from fedflat.errors import ClientError, InputError
from fedflat.runs.runner import run
from tests.parts.conformance.harness import StopAfter, assert_same_bits, distance
from tests.parts.conformance.parts import IMAGE_PARTS, PARTS

CLOSE = 1e-9
STACKING = [str(listed) for listed in (*PARTS, *IMAGE_PARTS) if all(map(can_stack, Method.parse(listed.text).parts))]


def federation(sizes: tuple[int, ...] = (7, 4, 9, 5, 7, 12), shape: tuple[int, ...] = (1, 8, 8)) -> Federation:
    source = torch.Generator().manual_seed(3)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, *shape, generator=source, dtype=torch.float64)
        return x, torch.randint(3, (count,), generator=source)

    return Federation([draw(n) for n in sizes], draw(6), [draw(3 + n % 3) for n in sizes], classes=3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 6), nn.ReLU(), nn.Linear(6, 3)
    )


def trained(method: str, stack: int | str = 1, **changes: Any) -> Any:
    own = {name: changes.pop(name) for name in ("federation", "model", "loss", "out", "callbacks") if name in changes}
    settings: dict[str, Any] = {
        "method": method,
        "rounds": 3,
        "participation": "uniform(5)",
        "local_epochs": 2,
        "batch_size": 4,
        "lr": 0.1,
        "momentum": 0.5,
        "weight_decay": 0.01,
        "clip": 1.0,
        "dtype": "float64",
        "backend": "serial",
        "evaluate_clients": None,
        "stack": stack,
    }
    own = {"federation": federation(), "model": network()} | own
    return run(Experiment(**(settings | changes)), progress=False, **own)


def assert_alike(one: Any, other: Any) -> None:
    """Weights and every state are equal up to rounding."""
    assert distance(one.server_weights, other.server_weights) <= CLOSE
    for i in {row["client"] for row in one.clients}:
        mine, theirs = one.client_state(i), other.client_state(i)
        assert mine.keys() == theirs.keys()
        for part in mine:
            for name, tensor in mine[part].items():
                assert tensor.shape == theirs[part][name].shape and tensor.dtype == theirs[part][name].dtype
                assert distance(tensor, theirs[part][name]) <= CLOSE, f"client {i}: {part}'s {name}"
    for mine, theirs in zip(one.clients, other.clients, strict=True):
        assert (mine["client"], mine["steps"]) == (theirs["client"], theirs["steps"])
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=CLOSE)
        assert mine["update_norm"] == pytest.approx(theirs["update_norm"], abs=CLOSE)


@pytest.mark.parametrize("method", STACKING)
def test_a_stack_gives_the_results_of_its_clients_one_by_one(method: str) -> None:
    """Ragged sizes and unequal steps, partial participation, momentum, weight decay, clipping, several rounds."""
    alone, stacked = trained(method), trained(method, stack=3)
    assert stacked._state.setup.stack == 3
    assert_alike(alone, stacked)


@pytest.mark.parametrize("method", ["scaffold+sam", "fedbabu", "ditto", "apfl", "fedprox+fednova", "keep_momentum"])
def test_one_worker_two_workers_and_a_resumed_run_give_the_same_bits(method: str, tmp_path: Path) -> None:
    alone, stacked = trained(method), trained(method, stack=3)
    assert_alike(alone, stacked)
    assert_same_bits(stacked, trained(method, stack=3, backend="pool", workers=1))
    assert_same_bits(stacked, trained(method, stack=3, backend="pool", workers=2))
    trained(method, stack=3, out=tmp_path / "run", callbacks=[StopAfter(1)])
    assert_same_bits(stacked, trained(method, stack=3, out=tmp_path / "run"))


@pytest.mark.parametrize(
    "method", ["fedavg", "ditto", "apfl", "fedper", "fedrep(head_epochs=1)", "fedbabu", "finetune"]
)
def test_clients_are_evaluated_together_with_the_results_of_one_by_one(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The common, personal and adapted models of all clients, also of new ones, on test sets of unequal size."""
    settings = {"evaluate_clients": 1, "new_clients": 2, "participation": "uniform(3)", "evaluate_every": 0}
    alone, stacked = trained(method, **settings), trained(method, stack=4, **settings)
    assert stacked._state.setup.stack == 4
    assert {name for row in alone.evaluations for name, value in row.items() if value is not None} >= {"adapted"}
    for mine, theirs in zip(stacked.evaluations, alone.evaluations, strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)
    pooled = trained(method, stack=4, backend="pool", workers=2, **settings)
    assert pooled.evaluations == stacked.evaluations
    monkeypatch.setattr(evaluation, "TOGETHER", 6)  # one or two clients at a time
    for mine, theirs in zip(trained(method, stack=4, **settings).evaluations, alone.evaluations, strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_clients_are_not_evaluated_one_by_one(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "fedflat.engine.evaluation"):
        run = trained(method, 4, evaluate_clients=1)
    assert run.evaluations
    assert "stacked evaluation failed" not in caplog.text


def test_dropout_draws_from_each_clients_own_stream() -> None:
    """So the masks, and the results, are those of the clients one by one, also where sizes differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Dropout(0.4), nn.ReLU(), nn.Linear(9, 3))
    stacked = trained("sam", stack=4, model=model)
    assert stacked._state.setup.stack == 4
    assert_alike(trained("sam", model=model), stacked)


class Centred(nn.Module):
    """Looks at all samples of a batch, which must be those of one client."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Scaled(nn.Module):
    """Has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(("layer", "folds"), [(nn.Tanh(), True), (Centred(), False), (Scaled(), False)])
def test_networks_that_do_not_fold_into_one_batch_are_vectorised(layer: nn.Module, folds: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), layer, nn.Linear(64, 3))
    stacked = trained("scaffold+sam", stack=4, model=model)
    assert (stacked._state.setup.stack, stacked._state.setup.folds) == (4, folds)
    assert_alike(trained("scaffold+sam", model=model), stacked)


@pytest.mark.parametrize(
    "first", [Centred(), nn.BatchNorm2d(1, affine=False, track_running_stats=False)], ids=["centred", "batch norm"]
)
def test_clients_are_told_apart_before_the_first_weights(first: nn.Module) -> None:
    """Only inputs that differ show that a module takes a mean over the clients."""
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(64, 3))
    assert_alike(trained("fedavg", model=model), trained("fedavg", stack=3, model=model))


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([nn.Unflatten(1, (1, 64)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()], "2.running_mean"),
        ([nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))], "1.parametrizations.weight.0._u"),
    ],
)
def test_networks_that_keep_statistics_train_one_by_one_and_the_trial_leaves_no_trace(
    layers: list[nn.Module], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 3))
    fallen_back = trained("fedavg", stack=3, model=model)
    assert f"{named} changes with every batch" in caplog.text
    assert_same_bits(fallen_back, trained("fedavg", model=model))


@pytest.mark.parametrize("stack", [4, "auto"])
def test_clients_whose_data_do_not_fit_together_train_one_by_one(stack: int | str) -> None:
    """Images of two sizes, which a network with adaptive pooling takes; neighbours of one size are still stacked."""
    source = torch.Generator().manual_seed(0)
    sides = [8 if i % 2 else 10 for i in range(40)]
    data = [
        (torch.randn(6, 1, side, side, generator=source), torch.randint(3, (6,), generator=source)) for side in sides
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    runs = [trained("fedavg", s, federation=Federation(data, data[0], classes=3), model=model) for s in (1, stack)]
    assert_alike(*runs)


@pytest.mark.parametrize("stack", [1, 2, 3, 8, 50])
def test_stacks_are_dealt_out_evenly_two_at_a_time(stack: int) -> None:
    """Every client once, the largest ones first in every stack, and two stacks of a pair as large up to one client."""
    for count in (1, 2, 7, 16, 100):
        sizes = np.sort(np.random.default_rng(count).integers(10, 20, count))[::-1]
        order = dealt(sizes, stack)
        assert sorted(order) == list(range(count))
        stacks = [order[start : start + stack] for start in range(0, count, stack)]
        assert all((np.diff(own) > 0).all() for own in stacks)
        for one, other in zip(stacks[::2], stacks[1::2], strict=False):
            if len(one) == len(other):
                assert abs(sizes[one].sum() - sizes[other].sum()) <= sizes[one[0]] - sizes[other[-1]]


def test_clients_of_very_different_sizes_are_not_mixed() -> None:
    """A stack takes as many steps as its largest client: two long ones would cost more than a long and a short one."""
    assert dealt(np.array([64, 32, 16, 8, 4, 2, 1, 1]), 2).tolist() == list(range(8))


def test_auto_looks_at_the_participants_that_the_user_names(caplog: pytest.LogCaptureFixture) -> None:
    """Sixteen of a hundred clients on two workers: no stack has more than eight."""
    e = Experiment(stack="auto", backend="pool", workers=2, rounds=1, batch_size=4, lr=0.1, local_epochs=1)
    with caplog.at_level(logging.INFO):
        run(
            e,
            federation=federation((4,) * 100),
            model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double(),
            participants=lambda t: range(16),
            progress=False,
        )
    told = next(r.getMessage() for r in caplog.records if "stack=auto" in r.getMessage())
    assert int(told.split("trains ")[1].split(" ")[0]) <= 8


def test_a_loss_that_knows_no_ignored_labels_stacks_clients_of_equal_sizes() -> None:
    def squares(output: Tensor, y: Tensor) -> Tensor:
        return (output - F.one_hot(y, 3)).square().mean()

    assert_alike(trained("fedavg", loss=squares), trained("fedavg", stack=4, loss=squares))


def test_a_client_that_diverges_is_left_out_and_its_neighbours_are_not() -> None:
    clients = federation((6, 6, 6, 6))
    clients.samples(2).x.fill_(float("inf"))  # type: ignore[attr-defined]
    runs = [trained("fedprox", stack, federation=clients, participation="all") for stack in (1, 4)]
    for found in runs:
        assert [row["left_out"] for row in found.metrics] == [1, 1, 1]
        assert {row["client"] for row in found.clients} == {0, 1, 3}
    assert_alike(*runs)


class Broken(nn.Module):
    """Fails on the data of one client."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() and bool((x > 50).any()):
            raise ValueError("too bright")
        return x


@pytest.mark.parametrize(
    ("method", "model", "named"),
    [
        ("moon", None, "'moon'"),
        (
            "fedavg",
            nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            "2 (BatchNorm1d)",
        ),
        ("fedavg", nn.Sequential(nn.Flatten(), Broken(), nn.Linear(64, 3)), "1 (Broken)"),
    ],
)
def test_what_cannot_be_stacked_is_named_once_and_trains_one_by_one(
    method: str, model: nn.Module | None, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model or network()
    with caplog.at_level(logging.WARNING):
        fallen_back = trained(method, stack=4, model=model, drop_last=True)
    told = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    assert len(told) == 1 and named in told[0]
    assert_same_bits(fallen_back, trained(method, model=model, drop_last=True))


class Drawing(nn.Module):
    """Draws random numbers as no rule of a stack knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn(x.shape, dtype=x.dtype)


def test_a_module_that_draws_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The second attempt of the trial must not repeat the names of the first."""
    model = nn.Sequential(nn.Flatten(), nn.Sequential(Drawing()), nn.Linear(64, 3))
    trained("fedavg", stack=4, model=model, rounds=1)
    told = next(r.getMessage() for r in caplog.records if "one by one" in r.getMessage())
    assert told.endswith(
        "Sequential → 1 (Sequential) → 1.0 (Drawing) cannot be vectorised over clients: it draws random numbers"
    )


@pytest.mark.parametrize(("method", "named"), [("man", "the part 'man'"), ("fedavg", "the network or the loss")])
def test_stacks_that_fall_apart_by_size_are_told_of(method: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 9), nn.Dropout(0.4) if method == "fedavg" else nn.ReLU(), nn.Linear(9, 3)
    )
    trained(method, stack=4, model=model, rounds=1)
    told = [r.getMessage() for r in caplog.records if "equally many samples" in r.getMessage()]
    assert len(told) == 1 and named in told[0] and "5 sizes" in told[0]
    caplog.clear()
    trained(method, stack=4, model=model, rounds=1, federation=federation((6, 6, 6, 6, 6, 6)))
    assert not caplog.records


def test_errors_name_the_client() -> None:
    class Refusing(TensorSamples):
        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            raise ValueError("torn page")

    clients = federation()
    clients._wrapped[3] = Refusing(*clients.samples(3).batch(torch.arange(5)))
    with pytest.raises(ClientError, match=r"(?s)client 3.*torn page"):
        trained("fedavg", stack=4, federation=clients, participation="all")


def test_auto_measures_says_what_it_picked_and_keeps_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = federation((3,) * 40)
    with caplog.at_level(logging.INFO):
        trained("fedavg", "auto", federation=many, out=tmp_path / "run", callbacks=[StopAfter(1)])
    picked = [record.getMessage() for record in caplog.records if "stack=auto" in record.getMessage()]
    assert len(picked) == 1
    run = trained("fedavg", "auto", federation=many, out=tmp_path / "run")
    assert (
        f"trains {run._state.setup.stack} clients" in picked[0] and run._state.inputs["stack"] == run._state.setup.stack
    )
    assert_same_bits(run, trained("fedavg", run._state.setup.stack, federation=many))


def test_the_field_takes_a_number_or_auto() -> None:
    assert [Experiment(stack=given).stack for given in (4, "4", "auto")] == [4, 4, "auto"]
    for wrong in (0, None, "some", 1.5):
        with pytest.raises(InputError, match="stack"):
            Experiment(stack=wrong)


class Turned(Federation):
    """Reads its labels in another way than it keeps them."""

    def samples(self, client: int) -> TensorSamples:
        own = super().samples(client)
        assert isinstance(own, TensorSamples)
        return TensorSamples(own.x[torch.arange(len(own))], 2 - own.labels)


@pytest.mark.parametrize("sizes", [None, [7, 5, 8, 5, 7, 12]], ids=["", "other sizes"])
@pytest.mark.parametrize("kind", [Federation, Turned])
def test_a_stack_reads_what_one_client_reads(kind: type[Federation], sizes: list[int] | None) -> None:
    """Whatever a subclass makes of the data, with sizes that are wrong, and in a second run."""
    data = [(own.x, own.y) for own in map(federation().samples, range(6)) if isinstance(own, TensorSamples)]
    own = kind(data, sizes=sizes, classes=3)
    alone, *stacked = (trained("fedavg", stack, federation=own, evaluate_every=0) for stack in (1, 3, 3))
    for one in stacked:
        assert one._state.setup.stack == 3 and distance(one.weights, alone.weights) < CLOSE


def test_a_stack_is_freed_without_the_garbage_collector() -> None:
    """Also one whose clients finish at different times."""
    gc.disable()
    try:
        before = sum(type(each) is StackedModel for each in gc.get_objects())
        trained("fedavg", 4, backend="serial")
        assert sum(type(each) is StackedModel for each in gc.get_objects()) == before
    finally:
        gc.enable()
