"""What the author of a part may rely on, whatever the back end and the other parts of the sum."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import flat, network, plain, same, world
from torch import Tensor, nn

import fedflat
from fedflat import Federation, InputError, Local, Part, RunError, Server
from fedflat.core.part import Fit
from fedflat.core.views import Update
from fedflat.errors import CheckpointError


@fedflat.register
@dataclass(frozen=True)
class Gatherer(Part):
    """The plain mean, taken after all updates have been gathered, as robust rules do; or of the first few."""

    first: int = 100

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        kept = []
        for update in updates:
            kept.append(update.delta)
            if len(kept) == self.first:
                break
        return torch.stack(kept).mean(0)


@fedflat.register
@dataclass(frozen=True)
class Twin(Part):
    """Trains a second trajectory in every round and keeps it to itself."""

    def train(self, local: Local, fit: Fit) -> None:
        fit()
        shared = local.theta.clone()
        local.theta.copy_(local.origin)
        fit(branch="personal")
        local.state(self)["own"] = local.theta.clone()
        local.theta.copy_(shared)


@fedflat.register
@dataclass(frozen=True)
class Halves(Part):
    """Trains the head alone, then the rest alone."""

    def train(self, local: Local, fit: Fit) -> None:
        head = local.model.mask(local.model.require_head(self.name))
        fit(only=head)
        trained = local.theta.clone()
        fit(only=1 - head)
        local.state(self).update(moved=(local.theta != trained) & head.bool())


@fedflat.register
@dataclass(frozen=True)
class InPlace(Part):
    """A server step that writes into the weights it was given."""

    def step(self, server: Server, delta: Tensor) -> None:
        server.theta.add_(delta)


@fedflat.register
@dataclass(frozen=True)
class Refusal(Part):
    """Gives up at the end of round 2."""

    armed: ClassVar[bool] = True

    def end_round(self, server: Server) -> None:
        if server.round == 2 and self.armed:
            raise RunError("no more")


@fedflat.register
@dataclass(frozen=True)
class Dice(Part):
    """Notes one draw a step."""

    def correct_gradient(self, local: Local) -> None:
        draws = local.state(self).get("draws", torch.empty(0))
        local.state(self)["draws"] = torch.cat([draws, torch.tensor([local.numpy_stream("dice").random()])])


def go(method: str, **changes: object) -> fedflat.Run:
    return fedflat.run(plain(method=method, rounds=3, **changes), federation=world((8, 8, 8, 8)), model=network())


@pytest.mark.parametrize("method", ["gatherer", "gatherer(first=2)"])
def test_a_rule_that_gathers_updates_or_stops_early_sees_the_same_on_every_back_end(method: str) -> None:
    serial, pool = go(method), go(method, backend="pool", workers=2)
    assert same(serial.weights, pool.weights)
    assert [row["clients"] for row in pool.metrics] == [4, 4, 4]


def test_gathering_all_updates_is_the_running_mean() -> None:
    assert torch.allclose(go("gatherer").weights, go("fedavg").weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize("base", ["fedavg", "scaffold", "fednova", "feddyn", "keep_momentum", "moon"])
def test_a_second_trajectory_leaves_the_first_alone(base: str) -> None:
    alone, accompanied = go(base, momentum=0.5), go(f"{base}+twin", momentum=0.5)
    assert same(alone.weights, accompanied.weights)
    assert [row["steps"] for row in alone.clients] == [row["steps"] for row in accompanied.clients]
    assert [row["loss"] for row in alone.clients] == [row["loss"] for row in accompanied.clients]


def test_a_second_trajectory_is_plain_training_on_the_same_minibatches() -> None:
    run = go("feddyn(alpha=0.5)+twin", participation="uniform(4)")
    reference = go("twin", participation="uniform(4)")
    first = fedflat.run(plain(method="twin"), federation=world((8, 8, 8, 8)), model=network())
    assert not same(run.client_state(0)["twin"], reference.client_state(0)["twin"])  # they start from other models
    feddyn = fedflat.run(plain(method="feddyn(alpha=0.5)+twin"), federation=world((8, 8, 8, 8)), model=network())
    assert same(feddyn.client_state(0)["twin"], first.client_state(0)["twin"])  # in round 1 from the same one


def test_what_is_not_trained_does_not_move_by_a_rounding_error() -> None:
    run = go("halves+const")
    assert not any(run.client_state(i)["halves"]["moved"].any() for i in range(4))


def test_a_step_in_place_does_not_move_what_was_sent() -> None:
    one, other = go("inplace", evaluated="selected"), go("fedavg", evaluated="selected")
    assert same(one.weights, other.weights)


def test_a_stream_goes_on_from_step_to_step_and_starts_anew_every_round() -> None:
    draws = go("dice").client_state(0)["dice"]["draws"]
    assert len(set(draws.tolist())) == len(draws) == 6


def test_displacements_can_be_nested() -> None:
    @fedflat.register
    @dataclass(frozen=True)
    class Nested(Part):
        def correct_gradient(self, local: Local) -> None:
            before = local.theta.clone()
            with local.displaced(by=torch.ones_like(before)):
                with local.displaced(by=torch.ones_like(before)):
                    assert torch.equal(local.theta, before + 1 + 1)
                assert torch.equal(local.theta, before + 1)
            assert torch.equal(local.theta, before)

    assert same(go("nested").weights, go("fedavg").weights)


def test_a_round_that_fails_half_way_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = plain(method="scaffold+refusal", rounds=3)
    federation = world((8, 8, 8, 8))
    with pytest.raises(RunError, match="no more"):
        fedflat.run(experiment, federation=federation, model=network(), out=tmp_path / "run")
    monkeypatch.setattr(Refusal, "armed", False)
    resumed = fedflat.run(experiment, federation=federation, model=network(), out=tmp_path / "run")
    assert [row["round"] for row in resumed.metrics] == [1, 2, 3]
    assert same(resumed.weights, go("scaffold").weights)


def test_a_table_that_lacks_rounds_is_refused_and_kept(tmp_path: Path) -> None:
    experiment, out = plain(rounds=4), tmp_path / "run"
    fedflat.run(experiment, federation=world(), model=network(), out=out)
    table = out / "metrics.jsonl"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        fedflat.run(experiment, federation=world(), model=network(), out=out)
    assert [json.loads(line)["round"] for line in table.read_text().splitlines()] == [1, 2]


def test_a_folder_in_which_nothing_was_run_is_free(tmp_path: Path) -> None:
    drop = plain(drop_last=True, batch_size=50)
    with pytest.raises(InputError, match="drop_last"):
        fedflat.run(drop, federation=world(), model=network(), out=tmp_path)
    assert len(fedflat.run(plain(), federation=world(), model=network(), out=tmp_path).metrics) == 1


def test_ignored_targets_are_neither_right_nor_wrong() -> None:
    x = torch.eye(4, dtype=torch.float64)
    model = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(10 * torch.eye(4))
    y = torch.tensor([0, 1, 3, -100])
    run = fedflat.run(plain(lr=0.0), federation=Federation([(x, y)], test=(x, y)), model=model)
    assert run.metrics[0]["accuracy"] == pytest.approx(2 / 3)


def test_one_output_has_no_accuracy() -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1] * 3)
    loss = lambda out, y: nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.double())  # noqa: E731
    run = fedflat.run(plain(), federation=Federation([(x, y)], test=(x, y)), model=nn.Linear(4, 1).double(), loss=loss)
    assert "accuracy" not in run.metrics[0] and run.metrics[0]["loss"] > 0


def test_numbers_are_no_classes() -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    run = fedflat.run(plain(), federation=Federation([(x, y)], test=(x, y)), model=nn.Linear(4, 1).double())
    with torch.no_grad():
        squared = (run.model(x) - y).square().mean().item()
    assert run.metrics[0]["loss"] == pytest.approx(squared) and "accuracy" not in run.metrics[0]
    assert run.metrics[0]["rmse"] == pytest.approx(squared**0.5)


def test_the_users_module_is_left_as_it_was() -> None:
    module = network()
    before = flat(module)
    fedflat.run(plain(rounds=2), federation=world(), model=module)
    assert torch.equal(flat(module), before)
