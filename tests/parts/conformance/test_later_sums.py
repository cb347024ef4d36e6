"""Sums with the methods since the five papers: what they share with other parts, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import InputError
from fedflat.core.method import Method
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local, Server
from fedflat.parts.distillation import FedNTD, FedSOL
from fedflat.parts.moon import Moon, features_at

from . import later_reference as later
from .harness import PARTIAL, UNEQUAL, assert_close, make_world, run_library
from .reference import Mlp
from .test_combinations import SWA, assert_sound, convolutional, run_digits
from .test_later_identities import SIMPLE, same_weights

NET = Mlp(3, 5, 2)
HEAD = NET.layers[0].size  # its first weight


@dataclass(frozen=True)
class Overheard(Part):
    """Notes the similarity that a client sends, and the update of its body."""

    name: ClassVar[str] = "overheard"
    rank: ClassVar[int] = 90
    heard: ClassVar[list[tuple[float, Tensor]]] = []

    def end(self, local: Local) -> None:
        self.heard.append((float(local.sent["fedwmsam"]["similarity"]), (local.theta - local.origin)[:HEAD]))


OWN = {  # small values, for a small network
    *("fedcm", "fedacg", "fedwmsam", "fedsmoo(rho=0.05)", "fedgloss(rho=0.05, rho_l=0.05)", "fedlesam", "fedgf"),
    *("fedsol(rho=0.1)", "fedswa", "fedmoswa", "fedinit", "fedexp", "qfedavg", "fedntd", "fedlc", "feddecorr"),
    *("fedgamma", "fednsam", "fedlesam_s", "fedlesam_d"),
}


@pytest.mark.parametrize("method", sorted(OWN))
def test_it_goes_with_man_const_and_swa(method: str) -> None:
    assert_sound(run_digits(f"{method}+man(zeta=0.1)+const+{SWA}", convolutional(), lr=0.02, momentum=0.0))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


@pytest.mark.parametrize("policy", ["average", "local", "silobn", "recompute"])
@pytest.mark.parametrize("method", sorted(OWN))
def test_it_goes_with_the_policies_of_batchnorm(method: str, policy: str) -> None:
    assert_sound(run_digits(method, normalised(), batchnorm=policy, rounds=2, local_steps=2, momentum=0.0))


def test_one_gradient_at_a_displaced_point_moves_the_statistics_there() -> None:
    """FedLESAM's only pass is displaced; its statistics move as often as FedAvg's."""
    runs = [run_digits(m, normalised(), participation="all", rounds=2) for m in ("fedavg", "fedlesam(rho=0.5)")]
    counts = [int(run.model.state_dict()["2.num_batches_tracked"]) for run in runs]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("method", ["fedsmoo", "fedmoswa", "fedwmsam", "fedgf", "fedgamma"])
def test_dp_refuses_what_sends_more_than_the_update(method: str) -> None:
    with pytest.raises(InputError, match=r"dp|plain mean"):
        run_library(make_world(NET), f"{method}+dp")


def test_two_control_variates_would_swing_for_ever() -> None:
    """Each would refresh c_i by a direction that holds the other's correction: c_i⁺ = g + c − c_i for both."""
    with pytest.raises(InputError, match="'fedmoswa' and 'scaffold' cannot be combined: both claim"):
        Method.parse("scaffold+fedmoswa")
    own, applied = {1.0: 0.0, -1.0: 0.0}, []
    for _ in range(4):
        common = sum(own.values()) / 2
        applied.append(1.0 + 2 * (common - own[1.0]))
        own = {g: g + 2 * (common - c) - (common - c) for g, c in own.items()}
    assert applied == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    "pair", [("ifca", "scaffold"), ("ifca", "fedcm"), ("ifca", "swa"), ("ifca", "feddyn"), ("fedcm", "mofedsam")]
)
def test_a_sum_without_sense_is_refused_with_both_names(pair: tuple[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        Method.parse("+".join(pair))
    assert all(repr(name) in str(caught.value) for name in pair)


@pytest.mark.parametrize("method", ["sam(rho=0.1)", "fedprox(mu=0.2)", "man(zeta=0.1)", "fedinit(beta=0.1)"])
def test_parts_beside_ifca_refer_to_the_chosen_model(method: str) -> None:
    if "fedinit" in method:
        with pytest.raises(InputError, match="ifca"):
            Method.parse(f"ifca+{method}")
        return
    world = make_world(NET, **SIMPLE)
    same_weights(world, f"ifca(k=1)+{method}", method, weighting="uniform")
    assert run_library(world, f"ifca(k=2)+{method}").weights.isfinite().all()


def test_qfedavg_lets_other_parts_follow_the_step_that_it_took() -> None:
    """Its clients send updates times F^q; FedCM's direction is that of the model all the same."""
    world = make_world(NET, participants=((0, 1, 2, 3),))
    run = run_library(world, "qfedavg(q=2.0)+fedcm(alpha=1.0)")
    moved = run.server_weights.numpy() - world.start
    assert_close(run.server_state["fedcm"]["m"], -moved / (3 * world.lr))


def test_a_mean_of_models_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="qfedavg: it knows no mean"):
        run_library(make_world(NET), "qfedavg", evaluated="selected")


@pytest.mark.parametrize(
    "pair",
    [
        *(("fedgf", "qfedavg"), ("fedgf", "pfedhn"), ("fedgf", "dp"), ("fedcm", "pfedhn"), ("fedwmsam", "pfedhn")),
        *(("ifca", "ditto"), ("apfl", "ditto"), ("finetune", "ditto")),
    ],
)
def test_a_part_that_would_mislead_or_hide_another_is_refused_with_both_names(pair: tuple[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        Method.parse("+".join(pair))
    assert all(repr(name) in str(caught.value) for name in pair)


@pytest.mark.parametrize("method", ["fedlesam(direction='last')", "fedinit(variant='code')"])
def test_a_form_that_needs_one_model_for_all_refuses_a_hypernetwork(method: str) -> None:
    with pytest.raises(InputError, match=rf"{method.split('(')[0]}: it cannot be combined with pfedhn"):
        run_library(make_world(NET), f"{method}+pfedhn")


def test_fedwmsam_compares_what_clients_send() -> None:
    """The move of a head that stays with the client does not count. With one participant m is its last update."""
    fedflat.register(Overheard)
    Overheard.heard.clear()
    run_library(make_world(NET, participants=((0,), (0,))), "fedwmsam+overheard+fedper", backend="serial")
    (first, before), (second, now) = Overheard.heard
    assert first == 0  # there is no m yet
    assert second == pytest.approx(1 - float(F.cosine_similarity(now, before, dim=0)))


def test_ifca_says_who_keeps_weights_with_the_clients() -> None:
    with pytest.raises(InputError, match=r"ifca.*fedper"):
        run_library(make_world(NET), "ifca+fedper")


@pytest.mark.parametrize("method", ["fedsol", "apfl(mix='logits')"])
def test_what_needs_a_whole_minibatch_says_so(method: str) -> None:
    with pytest.raises(InputError, match=f"microbatch: {method.split('(')[0]}"):
        run_digits(method, microbatch=7)


# ---- several trajectories ----

RULES = ["fedsmoo(rho=0.1)", "fedlesam(rho=0.2)", "fedlesam(rho=0.2, direction='last')", "fedsol(rho=0.3)"]
RULES += ["fedgf(rho=0.1, threshold=0.01, window=2)", "fedwmsam(rho=0.2)"]


@pytest.mark.parametrize("method", [*RULES, "fedgloss(rho=0.1, rho_l=0.1)"])
def test_a_second_trajectory_does_not_touch_the_first(method: str) -> None:
    world = make_world(NET, **SIMPLE)
    both, alone = run_library(world, f"{method}+ditto(lam=0.3)"), run_library(world, method)
    assert torch.equal(both.server_weights, alone.server_weights)
    part = method.split("(")[0]
    for i in range(4):
        kept, expected = both.client_state(i).get(part, {}), alone.client_state(i).get(part, {})
        assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("method", RULES)
def test_a_rule_about_the_path_of_the_common_model_leaves_a_clients_own_model_alone(method: str) -> None:
    """With no tie to the common model, Ditto's personal model is trained alone, once it has started."""
    world = make_world(NET, **(SIMPLE | {"participants": ((0, 1, 2, 3), *PARTIAL)}))
    own, plain = (run_library(world, m) for m in (f"{method}+ditto(lam=0.0)", "local_only"))
    for i in range(4):
        pairs = zip(own.personal(i).parameters(), plain.personal(i).parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


# ---- weights that stay with the clients ----


@dataclass(frozen=True)
class Surveyor(Part):
    """Notes by how much the weights are displaced in the last pass of a step, with the round and the step's number."""

    rank: ClassVar[int] = 90
    found: ClassVar[list[tuple[int, int, Tensor]]] = []

    def loss(self, local: Local, output: Any) -> Tensor | None:
        local.scratch(self).setdefault("passes", []).append(local.theta.clone())
        return None

    def correct_gradient(self, local: Local) -> None:
        passes = local.scratch(self).pop("passes")
        Surveyor.found.append((local.round, int(local.steps), passes[-1] - local.theta))


fedflat.register(Surveyor)


@pytest.mark.parametrize("method", ["fedlesam", "fedlesam(direction='last')", "fedwmsam", "fedgf(rho=0.0)"])
def test_what_the_server_knows_nothing_of_is_not_displaced(method: str) -> None:
    """The head stays with the clients: the ways between global models, from which these rules are made, lie outside."""
    Surveyor.found.clear()
    text = method.replace("fedgf(rho=0.0", "fedgf(rho=0.0, rho_g=0.3, threshold=0.0")
    run_library(make_world(NET, sizes=UNEQUAL, participants=PARTIAL, lr=0.05), f"{text}+surveyor+fedper")
    found = [shift for round, step, shift in Surveyor.found if round > 1 and step > 0]
    assert len(found) > 5
    assert any(shift[:HEAD].norm() > 0 for shift in found)
    assert all((shift[HEAD:] == 0).all() for shift in found)
    if "fedgf" not in method:
        lengths = [float(shift.norm()) for shift in found if shift.any()]
        assert lengths == pytest.approx([0.01] * len(lengths))


# ---- clients that start elsewhere ----

ELSEWHERE = "fedinit(beta=0.3, variant='code')"
ROUNDS = ((0, 1, 2, 3), (1, 3), (0, 1))


def last_round(method: str, **changes: Any) -> tuple[Any, Any, Any]:
    """The world, and the runs before and after its last round, in which clients 0 and 1 train."""
    world = make_world(NET, sizes=UNEQUAL, participants=ROUNDS)
    before, after = (
        run_library(w, f"{ELSEWHERE}+{method}", **changes) for w in (world.but(participants=ROUNDS[:-1]), world)
    )
    return world, before, after


@pytest.mark.parametrize("stack", [1, 3])
def test_fedlesam_looks_back_to_the_model_that_was_sent(stack: int) -> None:
    _, before, after = last_round("fedlesam(rho=0.1)", stack=stack)
    assert all(torch.equal(after.client_state(i)["fedlesam"]["old"], before.server_weights) for i in (0, 1))


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("method", ["scaffold(option=1)", "fedmoswa(option=1)"])
def test_a_variate_of_option_1_is_the_gradient_at_the_model_that_was_sent(method: str, stack: int) -> None:
    world, before, after = last_round(method, stack=stack)
    for i in (0, 1):
        kept = after.client_state(i)[method.split("(")[0]]["c"]
        assert_close(kept, world.loss_gradient(i, before.server_weights.numpy()))


@pytest.mark.parametrize("stack", [1, 3])
def test_qfedavg_weighs_by_the_loss_of_the_model_that_was_sent(stack: int) -> None:
    """F_i is its loss at w, Δ_i the way that it went from its own start."""
    world, before, after = last_round("qfedavg(q=2.0)", stack=stack)
    w, ways, weights = before.server_weights.numpy(), [], []
    for i in (0, 1):
        start = w + 0.3 * (w - before.client_state(i)["fedinit"]["last"].numpy())
        ways.append(after.client_state(i)["fedinit"]["last"].numpy() - start)
        weights.append(later.loss_of(world, i, w) + 1e-10)
    norm = sum(f**2 + 2 * f * (way @ way) / world.lr for f, way in zip(weights, ways, strict=True))
    moved = sum(f**2 * way for f, way in zip(weights, ways, strict=True)) / norm
    assert_close(after.server_weights, w + moved)


@dataclass(frozen=True)
class Pupil(Part):
    """Compares what a frozen model says of a batch with what the model that was sent says."""

    rank: ClassVar[int] = 90
    compared: ClassVar[list[tuple[int, bool]]] = []

    def broadcast(self, server: Server) -> dict[str, Tensor]:
        return {"sent": server.theta}

    def batch(self, local: Local, batch: Batch) -> Batch:
        if (told := local.scratch(FedNTD()).get("logits", local.scratch(FedSOL()).get("logits"))) is not None:
            with torch.no_grad(), local.model.loaded(local.received(self)["sent"]):
                self.compared.append((local.round, torch.equal(told, local.model(batch.x))))
        if (told := local.scratch(Moon()).get("received")) is not None:
            sent = features_at(local, local.received(self)["sent"], local.model.buffers, batch)
            self.compared.append((local.round, torch.equal(told, sent)))
        return batch


fedflat.register(Pupil)


@pytest.mark.parametrize("method", ["fedntd", "fedsol", "moon"])
def test_the_teacher_is_the_model_that_was_sent(method: str) -> None:
    Pupil.compared.clear()
    run_digits(f"{ELSEWHERE}+{method}+pupil", participation="all")
    assert {round for round, _ in Pupil.compared} >= {2, 3} and all(same for _, same in Pupil.compared)


def test_the_mean_of_models_with_unknown_starts_is_refused() -> None:
    with pytest.raises(InputError, match=r"fedinit: .*evaluated='selected'"):
        run_library(make_world(NET), ELSEWHERE, evaluated="selected")
    assert run_library(make_world(NET), "fedinit", evaluated="selected").weights.isfinite().all()


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_fedsol_perturbs_the_first_step_of_clients_that_start_elsewhere(variant: str) -> None:
    """In the first round they start at w, where there is nothing to disagree about."""
    Surveyor.found.clear()
    run_digits(f"fedsol(rho=0.1)+fedinit(beta=0.3, variant='{variant}')+surveyor", participation="all")
    for round, step, shift in Surveyor.found:
        assert float(shift.norm()) == pytest.approx(0.1 if round > 1 or step > 0 else 0.0, rel=1e-4)
