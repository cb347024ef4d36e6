"""Parts and methods: order never matters, one owner a slot, and state goes where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import Diary, flat, network, plain, restless, same, world
from torch import Tensor

import fedflat
from fedflat import Local, Method, Part
from fedflat.core import registry
from fedflat.errors import InputError, UnknownNameError


@dataclass(frozen=True)
class Half(Part):
    """Follow half the gradient."""

    def gradient(self, local: Local, backward: Any) -> None:
        backward()
        local.grad.mul_(0.5)


@dataclass(frozen=True)
class Double(Part):
    """Follow twice the gradient."""

    by: float = 2.0

    def gradient(self, local: Local, backward: Any) -> None:
        backward()
        local.grad.mul_(self.by)


@dataclass(frozen=True)
class Probe(Part):
    """Look at the loss somewhere else before every step, and come back."""

    size: float = 1.0

    def gradient(self, local: Local, backward: Any) -> None:
        with local.displaced(by=torch.full_like(local.theta, self.size)):
            backward()
        backward()


@dataclass(frozen=True)
class Ridge(Part):
    """λ/2·‖w‖² as a term of the loss."""

    weight: float = 0.1

    def loss(self, local: Local, output: Any) -> Tensor:
        return self.weight / 2 * sum(p.square().sum() for p in local.model.module.parameters())


@dataclass(frozen=True)
class Nudge(Part):
    """λ·w as a correction of the gradient."""

    weight: float = 0.1

    def correct_gradient(self, local: Local) -> None:
        local.grad.add_(local.theta, alpha=self.weight)


@dataclass(frozen=True)
class Ball(Part):
    """Stay within a distance of the weights received."""

    radius: float = 0.1

    def constrain_weights(self, local: Local) -> None:
        move = local.theta - local.origin
        local.theta.copy_(local.origin + move * min(1.0, self.radius / float(move.norm())))


for part in (Half, Double, Probe, Ridge, Nudge, Ball):
    fedflat.register(part)


def trained(method: str, **changes: Any) -> Tensor:
    run = fedflat.run(plain(method=method, rounds=2, **changes), federation=world(), model=network())
    return run.server_weights


def test_a_method_is_what_its_parts_say_in_any_order() -> None:
    assert str(Method.parse("nudge(weight=0.5)+double")) == str(Method.parse("double + nudge(0.5)"))
    assert same(trained("diary+nudge+half"), trained("half+diary+nudge"))


def test_fedavg_adds_nothing() -> None:
    assert same(trained("fedavg"), trained("fedavg+fedavg"))
    assert same(trained("nudge"), trained("fedavg+nudge"))


def test_a_method_survives_being_written_down() -> None:
    method = Method.parse("double(by=3.0)+nudge+fedavg")
    assert Method.parse(str(method)).parts == method.parts
    assert Method.parse(Double(by=3.0)).parts == (Double(by=3.0),)
    assert Method.parse(method) is method


def test_two_owners_of_one_slot_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'double' and 'half' cannot be combined: both claim .*gradient"):
        Method.parse("half+double")


def test_a_part_stands_once() -> None:
    with pytest.raises(InputError, match="'nudge' appears twice"):
        Method.parse("nudge+nudge(0.2)")


def test_an_unknown_part_or_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'nudge'"):
        Method.parse("nugde")
    with pytest.raises(UnknownNameError, match="did you mean 'weight'"):
        Method.parse("nudge(wieght=1)")
    with pytest.raises(UnknownNameError, match="did you mean 'fedavg'"):
        fedflat.run(plain(method="fedavgg"), federation=world(), model=network())


def test_a_name_of_the_library_cannot_be_taken() -> None:
    class FedAvg(Part):
        pass

    with pytest.raises(InputError, match="exists already"):
        fedflat.register(FedAvg)


def test_what_would_be_passed_over_in_silence_is_refused() -> None:
    @dataclass(frozen=True)
    class Misspelt(Part):
        def correct_gradent(self, local: Local) -> None:
            local.grad.zero_()

    class Plain(Part):
        strength: float = 1.0

    with pytest.raises(InputError, match=r"Misspelt.correct_gradent fills no slot: did you mean 'correct_gradient'"):
        fedflat.register(Misspelt)
    with pytest.raises(InputError, match="Plain has fields but is no dataclass"):
        fedflat.register(Plain)


def test_types_that_cannot_be_read_are_told() -> None:
    @dataclass(frozen=True)
    class Typed(Part):
        rho: "Unseen" = 0.1  # type: ignore[name-defined]  # noqa: F821, UP037

    fedflat.register(Typed)
    with pytest.raises(InputError, match=r"types of method 'typed' cannot be read: name 'Unseen' is not defined"):
        Method.parse("typed")


def test_an_owner_of_the_gradient_replaces_the_plain_rule() -> None:
    """Half the gradient is half the learning rate."""
    assert torch.allclose(trained("half", lr=0.2), trained("fedavg", lr=0.1), rtol=0, atol=1e-14)


def test_a_loss_term_a_correction_and_weight_decay_agree() -> None:
    decayed = trained("fedavg", weight_decay=0.1)
    assert torch.allclose(trained("ridge"), decayed, rtol=0, atol=1e-13)
    assert torch.allclose(trained("nudge"), decayed, rtol=0, atol=1e-13)


def test_corrections_come_before_the_clip_and_constraints_after_the_step() -> None:
    start, one = flat(network()), {"batch_size": 0, "lr": 1.0}
    corrected = fedflat.run(plain(method="nudge(100.0)", clip=0.5, **one), federation=world(), model=network())
    assert (corrected.server_weights - start).norm() <= 0.5
    bound = fedflat.run(plain(method="ball(0.01)", lr=9.0), federation=world(), model=network())
    assert (bound.server_weights - start).norm() <= 0.01 + 1e-12


def test_a_displaced_pass_leaves_weights_and_statistics_bit_for_bit() -> None:
    runs = [
        fedflat.run(
            plain(method=m, dtype="float32"),
            federation=world(),
            model=torch.nn.Sequential(*restless()[:3], restless()[4]),
        )
        for m in ("fedavg", "probe")
    ]
    assert same(runs[0].server_weights, runs[1].server_weights)
    assert same(runs[0].model.state_dict(), runs[1].model.state_dict())


# ---- state ----

TURNS = [[0, 1], [1, 2], [1], [0, 1]]


@pytest.mark.parametrize("options", [{"backend": "serial"}, {"workers": 1}, {"workers": 2}], ids=str)
def test_state_is_kept_for_participants_and_arrives_unchanged(options: dict[str, Any]) -> None:
    exp = plain(**({"backend": "pool", "rounds": 4, "method": "diary"} | options))
    run = fedflat.run(exp, federation=world((6, 10, 14, 8)), model=network(), participants=TURNS.__getitem__)
    kept = [run.client_state(i).get("diary", {}) for i in range(4)]
    assert [k["rounds"].tolist() if k else None for k in kept] == [[1, 4], [1, 2, 3, 4], [2], None]
    assert [k["rounds_seen"].item() if k else None for k in kept] == [2, 4, 1, None]
    assert run.client_state(3) == {}
    types = {name: (t.dtype, t.dim()) for name, t in kept[0].items()}
    assert types == {
        "drift": (torch.float64, 1),
        "rounds_seen": (torch.int64, 0),
        "rounds": (torch.int32, 1),
        "short": (torch.bfloat16, 2),
        "flag": (torch.bool, 0),
        "nothing": (torch.uint8, 2),
    }
    server = run.server_state["diary"]
    assert server["heard"].tolist() == [2, 4, 1, 0]
    assert server["messages"].item() == 7.0
    assert same(kept[2]["short"], fedflat_after(exp, 2, client=2))


def fedflat_after(exp: fedflat.Experiment, rounds: int, client: int) -> Tensor:
    """What a shorter run leaves with a client that takes no part later."""
    short = exp.replace(rounds=rounds)
    run = fedflat.run(short, federation=world((6, 10, 14, 8)), model=network(), participants=TURNS.__getitem__)
    return run.client_state(client)["diary"]["short"]


def test_what_a_run_shows_of_its_state_is_a_copy() -> None:
    run = fedflat.run(plain(method="diary"), federation=world(), model=network())
    for state in (run.client_state(0), run.server_state):
        for tensor in state["diary"].values():
            tensor.zero_()
    run.weights.zero_()
    run.server_weights.zero_()
    assert run.client_state(0)["diary"]["drift"].any()
    assert run.server_state["diary"]["centre"].any()
    assert run.weights.any() and run.server_weights.any()


@pytest.mark.parametrize("client", [-1, 3])
def test_a_client_that_does_not_exist_has_no_state(client: int) -> None:
    run = fedflat.run(plain(), federation=world(), model=network())
    with pytest.raises(InputError, match="clients 0 to 2"):
        run.client_state(client)
    with pytest.raises(InputError, match="clients 0 to 2"):
        run.personal(client)


def test_a_method_without_personal_models_says_so() -> None:
    run = fedflat.run(plain(), federation=world(), model=network())
    with pytest.raises(InputError, match="keeps no personal model"):
        run.personal(0)


@dataclass(frozen=True)
class Own(Diary):
    """Client i's own model is the server's plus its drift."""

    def personal(self, state: Any, theta: Tensor) -> dict[str, Tensor] | None:
        return {"theta": theta + state["drift"]} if state else None


@dataclass(frozen=True)
class Remember(Part):
    """Keep the server's weights as they are, without copying them."""

    def end_round(self, server: Any) -> None:
        server.state(self)["now"] = server.theta
        server.state(self)["also"] = server.theta
        server.state(self)["column"] = server.theta.view(-1, 1).expand(-1, 2)


fedflat.register(Own)
fedflat.register(Remember)


def test_a_personal_model_is_a_module_with_the_clients_weights() -> None:
    run = fedflat.run(plain(method="own"), federation=world(), model=network(), participants=lambda t: [1])
    expected = run.server_weights + run.client_state(1)["own"]["drift"]
    assert same(flat(run.personal(1)), expected)
    with pytest.raises(InputError, match="no personal model for client 0 yet"):
        run.personal(0)


def test_state_that_shares_memory_with_the_weights_can_be_saved(tmp_path: Any) -> None:
    run = fedflat.run(plain(method="remember"), federation=world(), model=network(), out=tmp_path / "run")
    loaded = fedflat.load_run(tmp_path / "run", model=network())
    assert same(loaded.server_state, run.server_state)
    assert same(loaded.server_state["remember"]["now"], run.server_weights)


class Entry:
    """An installed part: an entry point that loads `what`."""

    def __init__(self, name: str, what: Any) -> None:
        self.name, self.value, self.what = name, f"elsewhere:{name}", what

    def load(self) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


def test_a_broken_plugin_or_one_that_shadows_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [
        Entry("broken", ImportError("no module")),
        Entry("sam", Half),
        Entry("no_part", dict),
        Entry("half", Half),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry._installed.cache_clear()
    try:
        known = registry.known_parts()
        assert str(Method.parse("fedavg+sam")) == "sam"
    finally:
        registry._installed.cache_clear()
    assert known["half"] is Half and known["sam"] is not Half and not {"broken", "no_part"} & known.keys()
    for name in ("broken", "sam", "no_part"):
        assert f"the installed part '{name}'" in caplog.text
