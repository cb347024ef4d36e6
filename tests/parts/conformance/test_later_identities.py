"""Identities of the methods since the five papers, and what they do with input that makes no sense."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import Experiment, Federation, InputError
from fedflat.core.flat import FlatModel
from fedflat.core.method import Method
from fedflat.engine.assembly import assemble
from fedflat.parts.distillation import not_true_divergence
from fedflat.parts.fedinit import FedInit
from fedflat.parts.label_skew import correlation_penalty
from fedflat.parts.personal.ifca import starts
from fedflat.parts.requirements import of_one_class
from fedflat.runs.runner import run

from . import reference as ref
from .harness import PARTIAL, REGIMES, UNEQUAL, assert_close, assert_same_bits, make_world, module_of, run_library
from .reference import Array, Linear, Mlp, World
from .test_later_closed_forms import CLASSES, LABELS, labelled, run_labelled

NET = Mlp(3, 5, 2)
HARD = REGIMES["Nesterov, weight decay, clip, unequal sizes, some take part"]
SIMPLE = {"sizes": UNEQUAL, "participants": PARTIAL, "steps": 4, "batch": 3}


def same_weights(world: World, left: str, right: str, **changes: Any) -> None:
    one, two = (run_library(world, method, **changes) for method in (left, right))
    assert torch.equal(one.server_weights, two.server_weights)


# ---- bits ----


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("fedgamma(rho=0.0)", "scaffold"),
        ("fedsmoo(rho=0.0, alpha=0.2)", "feddyn(alpha=0.2)"),
        ("fedlesam_s(rho=0.0)", "scaffold"),
        ("fedlesam_d(rho=0.0, alpha=0.2)", "feddyn(alpha=0.2)"),
        ("fedgloss(rho=0.0, rho_l=0.1, beta=4.0)", "feddyn(alpha=0.25)+sam(rho=0.1)"),
        ("fedgloss(rho=0.0, rho_l=0.0, beta=4.0)", "feddyn(alpha=0.25)"),
        ("fedgloss(rho=0.0, rho_l=0.0, beta=4.0, warmup=3)", "feddyn(alpha=0.25)"),
        ("fedgf(rho=0.1, threshold=None)", "sam(rho=0.1)"),
        ("fedwmsam(alpha=0.3, rho=0.0)+fedinit(beta=0.0)", "fedwmsam(alpha=0.3, rho=0.0)"),
        ("fedadagrad(beta1=0.0)", "fedadagrad"),
    ],
)
def test_a_special_case_is_the_simpler_method_bit_for_bit(left: str, right: str) -> None:
    same_weights(make_world(NET, **HARD), left, right)


def test_fedacg_without_momentum_is_fedprox_with_plain_means() -> None:
    same_weights(make_world(NET, **HARD), "fedacg(lam=0.0, beta=0.3)", "fedprox(mu=0.3)", weighting="uniform")


def test_one_model_of_ifca_is_fedavg_with_plain_means() -> None:
    same_weights(make_world(NET, **HARD), "ifca(k=1)", "fedavg", weighting="uniform")


def test_where_everybody_takes_part_the_two_directions_of_fedlesam_are_one() -> None:
    same_weights(make_world(NET, sizes=UNEQUAL), "fedlesam(rho=0.3)", "fedlesam(rho=0.3, direction='last')")


def test_one_step_of_fedsol_is_fedavgs() -> None:
    same_weights(make_world(NET, **(HARD | {"steps": 1})), "fedsol(rho=5.0)", "fedavg")


def test_a_single_participant_of_fedexp_is_not_extrapolated() -> None:
    world = make_world(NET, participants=((0,), (2,), (1,)))
    same_weights(world, "fedexp(eps=0.0)", "fedavg")
    rates = [row["fedexp_rate"] for row in run_library(make_world(NET), "fedexp(eps=1e9)").metrics]
    assert rates == [1.0] * 4


# ---- formulas ----


def test_the_common_perturbation_of_fedsmoo_has_the_length_of_its_radius() -> None:
    run = run_library(make_world(NET, **SIMPLE), "fedsmoo(rho=0.3)")
    assert float(run.server_state["fedsmoo"]["s"].norm()) == pytest.approx(0.3)


def test_the_first_step_of_fedsmoo_is_sams() -> None:
    world = make_world(NET, participants=((0, 1, 2, 3),), steps=1)
    left, right = (run_library(world, m) for m in ("fedsmoo(rho=0.3, alpha=0.2)", "feddyn(alpha=0.2)+sam(rho=0.3)"))
    assert_close(left.server_weights, right.server_weights, 1e-14)


def test_one_full_batch_step_of_fedacg_is_nesterovs_accelerated_gradient() -> None:
    """v ← λ v − η ∇F(w + λ v),  w ← w + v on the mean loss."""
    world = make_world(Linear(4, 2), sizes=UNEQUAL, steps=1)
    w, v = world.start, np.zeros_like(world.start)
    for _ in world.participants:
        v = 0.7 * v - world.lr * np.mean([world.loss_gradient(i, w + 0.7 * v) for i in range(4)], axis=0)
        w = w + v
    assert_close(run_library(world, "fedacg(lam=0.7, beta=0.0)").server_weights, w)


def test_the_mean_of_the_local_models_is_measured_from_what_was_sent() -> None:
    """FedACG's server ends at that mean, though it sends something else."""
    run = run_library(make_world(NET, **HARD), "fedacg(lam=0.6)", evaluated="selected")
    assert_close(run.weights, run.server_weights, 1e-12)
    moved = run_library(make_world(NET, **HARD), "fedgloss(rho=0.2)", evaluated="selected")
    assert not torch.allclose(moved.weights, moved.server_weights)


def test_fedmoswa_without_its_novelties_is_scaffold_where_everybody_takes_part() -> None:
    world = make_world(NET, sizes=UNEQUAL)
    left, right = (run_library(world, m) for m in ("fedmoswa(rho=1.0, alpha=1.0, gamma=1.0)", "scaffold"))
    assert_close(left.server_weights, right.server_weights)


def test_under_fedswa_other_parts_divide_by_the_sum_of_the_rates() -> None:
    """With everybody and γ = 1 FedMoSWA is SCAFFOLD under FedSWA's rates: both hold Δ/Σ_kη_k."""
    world = make_world(NET, sizes=UNEQUAL, batch=3, steps=None, epochs=2)
    left = run_library(world, "fedmoswa(rho=0.2, alpha=1.3, gamma=1.0)")
    right = run_library(world, "scaffold+fedswa(rho=0.2, alpha=1.3)")
    assert_close(left.server_weights, right.server_weights)
    once = world.but(participants=((0, 1, 2, 3),))
    run = run_library(once, "fedcm(alpha=1.0)+fedswa(rho=0.2, alpha=1.0)")
    steps = np.array([row["steps"] for row in run.clients])
    path = np.mean(world.lr * (steps * 1.2 + 0.8) / 2)
    assert_close(run.server_state["fedcm"]["m"], (world.start - run.server_weights.numpy()) / path)


def test_under_fedswa_fednova_counts_the_steps_by_their_rates() -> None:
    """Equal numbers of steps: nothing to normalise."""
    world = make_world(NET, **SIMPLE)
    left, right = (run_library(world, m, weighting="uniform") for m in ("fedswa+fednova", "fedswa"))
    assert_close(left.server_weights, right.server_weights)


def test_fedwmsam_with_equal_clients_is_fedcm() -> None:
    world = make_world(NET)
    alike = world.but(data=[world.data[0]] * 4)
    left, right = (run_library(alike, m) for m in ("fedwmsam(alpha=0.3, rho=0.0, rate=0.0)", "fedcm(alpha=0.3)"))
    assert_close(left.server_weights, right.server_weights)


def test_a_client_that_ended_where_the_server_is_starts_there() -> None:
    """With one client the server's model is the client's last one."""
    world = make_world(NET, sizes=(6,), participants=((0,),) * 4)
    left, right = (run_library(world, m) for m in ("fedinit(beta=0.5)", "fedavg"))
    assert_close(left.server_weights, right.server_weights, 1e-13)


def test_orthogonal_updates_of_equal_length_are_extrapolated_by_half_their_number() -> None:
    """A linear loss with one coordinate per client: Δ_i = −η e_i."""
    basis = np.eye(4)
    world = make_world(Linear(4, 1)).but(data=[(basis[i : i + 1], np.ones((1, 1))) for i in range(4)])
    world = world.but(participants=((0, 1, 2, 3),), steps=1, start=np.zeros(5))
    module = nn.Linear(4, 1, bias=False).double()
    run = run_library(world, "fedexp(eps=0.0)", module=module, loss=lambda out, y: (out * y).sum(1).mean())
    assert run.metrics[0]["fedexp_rate"] == pytest.approx(2.0)


def test_a_large_q_follows_the_worst_client() -> None:
    world = make_world(Linear(4, 2), participants=((0, 1, 2, 3),))
    losses = [float(0.5 * ((world.net.output(world.start, x) - y) ** 2).sum(1).mean()) for x, y in world.data]
    worst = int(np.argmax(losses))
    move = run_library(world, "qfedavg(q=60.0)").server_weights.numpy() - world.start
    alone = ref.fedavg(world.but(participants=((worst,),))).w - world.start
    assert move @ alone / np.linalg.norm(move) / np.linalg.norm(alone) > 0.999


def test_two_groups_with_opposite_labels_separate_under_ifca() -> None:
    x = np.random.default_rng(0).normal(size=(12, 4))
    data = [(x, (1 if i < 2 else -1) * x[:, :2]) for i in range(4)]
    world = make_world(Linear(4, 2), participants=((0, 1, 2, 3),)).but(data=data)
    flat = FlatModel(module_of(world), torch.float64)
    opposite = -starts(flat, flat.theta, 2, world.seed)[1].numpy()  # so that no model is better for both groups
    run = run_library(world.but(start=opposite), "ifca(k=2)")
    choices = [int(run.client_state(i)["ifca"]["choice"]) for i in range(4)]
    assert choices[0] == choices[1] != choices[2] == choices[3]


# ---- losses ----


def test_the_not_true_divergence_ignores_the_true_logit_and_vanishes_for_equal_models() -> None:
    torch.manual_seed(0)
    kept, now = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    y = torch.arange(6) % 5
    moved = now.scatter_add(1, y[:, None], torch.randn(6, 1, dtype=torch.float64))
    assert torch.allclose(not_true_divergence(kept, now, y, 2.0), not_true_divergence(kept, moved, y, 2.0))
    assert not_true_divergence(kept, kept, y, 2.0) == 0
    rows = [F.softmax(torch.cat([z[i, : y[i]], z[i, y[i] + 1 :]]) / 2.0, 0) for z in (kept, now) for i in range(6)]
    expected = np.mean([float((p * (p / q).log()).sum()) for p, q in zip(rows[:6], rows[6:], strict=True)])
    assert float(not_true_divergence(kept, now, y, 2.0)) == pytest.approx(expected)


def test_ignored_labels_and_positions_of_a_map_have_their_place_in_the_not_true_divergence() -> None:
    torch.manual_seed(0)
    kept, now = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    y = torch.randint(0, 4, (2, 3, 3))
    flat = [z.permute(0, 2, 3, 1).reshape(18, 4) for z in (kept, now)]
    assert torch.allclose(not_true_divergence(kept, now, y, 1.0), not_true_divergence(*flat, y.reshape(18), 1.0))
    y[0] = -100
    rest = not_true_divergence(*(z[9:] for z in flat), y[1].reshape(9), 1.0)
    assert torch.allclose(not_true_divergence(kept, now, y, 1.0), rest)


def test_the_first_step_of_fedntd_is_fedavgs() -> None:
    world = labelled("full batch, everyone").but(steps=1, participants=((0, 1, 2, 3),))
    left, right = (run_labelled(world, method) for method in ("fedntd(beta=5.0)", "fedavg"))
    assert_close(left.server_weights, right.server_weights, 1e-13)


def test_feddecorr_is_the_mean_squared_correlation_on_the_scale_of_the_code() -> None:
    torch.manual_seed(0)
    f = torch.randn(9, 4, dtype=torch.float64)
    correlation = torch.from_numpy(np.corrcoef(f.numpy().T))
    off = correlation[~torch.eye(4, dtype=torch.bool)].square().mean()
    penalty = float(correlation_penalty(f))
    assert penalty == pytest.approx(float(off * 8**2 / 9), rel=1e-6)
    assert float(correlation_penalty(f * torch.tensor([3, 0.5, 2, 9]) + 7)) == pytest.approx(penalty, rel=1e-6)
    orthogonal = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert float(correlation_penalty(orthogonal)) == pytest.approx(0, abs=1e-15)
    constant = torch.cat([f[:, :1], torch.ones(9, 1, dtype=torch.float64)], 1)
    assert float(correlation_penalty(constant)) == 0
    maps = f[:, :, None, None].expand(9, 4, 2, 2)
    assert float(correlation_penalty(maps)) == pytest.approx(penalty)
    sequences = f[:, None, :].expand(9, 3, 4)
    assert float(correlation_penalty(sequences)) == pytest.approx(penalty)


def test_a_batch_of_one_sample_has_no_decorrelation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        same_weights(make_world(NET, **(SIMPLE | {"batch": 1})), "feddecorr(beta=5.0)", "fedavg")
    assert "batch_size=1" in caplog.text


def last_rows(weights: Array) -> Array:
    """The head's weights, one row per class, with the biases in the last column."""
    head = weights[LABELS.layers[0].size :]
    weight, bias = head[: CLASSES * LABELS.hidden].reshape(CLASSES, -1), head[CLASSES * LABELS.hidden :]
    return np.concatenate([weight, bias[:, None]], axis=1)


def test_fedlc_leaves_the_rows_of_absent_classes_where_they_are() -> None:
    world = labelled("full batch, everyone").but(participants=((1,),))  # which has neither class 0 nor 1
    before, after = (last_rows(w) for w in (world.start, run_labelled(world, "fedlc").server_weights.numpy()))
    assert np.array_equal(before[:2], after[:2])
    assert (before[2:] != after[2:]).all()


def test_fedlc_with_equal_counts_is_cross_entropy() -> None:
    world = labelled("full batch, everyone")
    even = world.but(data=[(x[:4], np.arange(4)) for x, _ in world.data])
    for method in ("fedlc(tau=2.0)", "fedlc(tau=2.0, form='log')"):
        assert_close(run_labelled(even, method).server_weights, run_labelled(even, "fedavg").server_weights, 1e-13)


# ---- bad input ----

OUT_OF_RANGE = [
    *(
        "fedcm(alpha=1.1)",
        "fedcm(alpha=0.0)",
        "mofedsam(beta=0.0)",
        "fedacg(lam=1.0)",
        "fedacg(beta=-1.0)",
        "fedwmsam(alpha=1.0)",
        "fedwmsam(rate=2.0)",
        "fedwmsam(alpha=0.0, rate=0.0)",
    ),
    *(
        "fedsmoo(rho=-1.0)",
        "fedsmoo(server='cloud')",
        "fedgloss(beta=0.0)",
        "fedgloss(warmup=-1)",
        "fedlesam(rho=-1.0)",
    ),
    *("fedlesam(direction='mine')", "fedgf(window=0)", "fedgf(threshold=-1.0)", "fedsol(temperature=0.0)"),
    *("fedswa(rho=1.1)", "fedmoswa(gamma=1.1)", "fedmoswa(option=3)", "fedinit(beta=-1.0)", "fedinit(variant='mine')"),
    *("fedexp(eps=-1.0)", "fedexp(variant='mine')", "qfedavg(q=-1.0)", "fedntd(tau=0.0)", "fedlc(tau=-1.0)"),
    *("fedlc(form='exp')", "feddecorr(beta=-1.0)", "ifca(k=0)", "fedadagrad(beta1=1.0)"),
]


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_a_value_outside_its_range_is_refused_naming_part_and_field(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Method.parse(text)
    assert all(word in str(caught.value) for word in (text.split("(")[0], text.split("(")[1].split("=")[0]))


def test_more_models_than_clients_are_refused() -> None:
    with pytest.raises(InputError, match=r"ifca: k=5 models for 4 clients"):
        run_library(make_world(NET), "ifca(k=5)")


class Odd(nn.Module):
    """A network with a parameter that no layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_ifca_says_which_parameter_cannot_be_drawn_anew() -> None:
    with pytest.raises(InputError, match=r"'scale'.*reset_parameters"):
        run_library(make_world(NET), "ifca", module=Odd())


@pytest.mark.parametrize("name", ["lenet5", "lenet5(bias=True)", "cnn64(width=4)", "resnet18_nonorm"])
def test_the_models_of_ifca_start_with_losses_alike(name: str) -> None:
    """Otherwise one of them is never chosen: some networks are drawn by a law that is not PyTorch's."""
    e = Experiment(model=name, method="ifca(k=3)", data="digits")
    images = Federation([(torch.randn(8, 3, 32, 32), torch.arange(8) % 4)] * 4, classes=4)
    flat = assemble(e, images, None).model
    x, y = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
    with torch.no_grad():
        losses = []
        for theta in starts(flat, flat.theta, 3, e.seed):
            flat.theta.copy_(theta)
            losses.append(float(nn.functional.cross_entropy(flat(x), y)))
    assert max(losses) < 3 * min(losses)


@pytest.mark.parametrize(
    ("given", "reason"), [({"weights": "w.safetensors"}, "weights="), ({"batchnorm": "recompute"}, "batchnorm=")]
)
def test_ifca_refuses_what_is_made_for_one_model(given: dict[str, Any], reason: str) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    two = Federation([(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 2, classes=2)
    with pytest.raises(InputError, match=f"ifca: {reason}"):
        assembled = assemble(Experiment(method="ifca", **given), two, module)
        assembled.method.parts[0].check(assembled)


def test_a_window_longer_than_the_run_counts_all_rounds() -> None:
    world = make_world(NET, **SIMPLE)
    same_weights(world, "fedgf(threshold=0.4, window=1000)", "fedgf(threshold=0.4, window=5)")


def test_fedwmsam_beside_momentum_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_library(make_world(NET, momentum=0.9), "fedwmsam")
    assert any("fedwmsam" in r.getMessage() and "momentum=0" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("method", ["fedcm(alpha=0.1)", "mofedsam(beta=0.1)"])
def test_the_last_direction_grows_under_momentum_and_a_warning_says_so(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 10 steps with momentum 0.9 the last direction is applied 0.9 times with a mean weight above 1/0.9."""
    with caplog.at_level(logging.WARNING):
        run_library(make_world(NET), method)
        assert not caplog.records
        run_library(make_world(NET, momentum=0.9), method)
    assert "up to 10 times" in caplog.text and "Set momentum=0" in caplog.text
    weights = [(1 - 0.9 ** (10 - k)) / (1 - 0.9) for k in range(10)]
    assert 0.9 * np.mean(weights) == pytest.approx(3.72, abs=0.02)  # the growth of m per round


def test_fedinit_warns_where_the_model_would_run_away(caplog: pytest.LogCaptureFixture) -> None:
    """On a constant slope the server takes over β times what a client has missed, N/|S| − 1 moves of its own."""

    def last_move(participants: int, beta: float) -> float:
        draw, w, last = np.random.default_rng(0), 0.0, np.zeros(100)
        for _ in range(400):
            chosen = draw.choice(100, participants, replace=False)
            last[chosen] = w + beta * (w - last[chosen]) - 0.01
            before, w = w, last[chosen].mean()
        return abs(w - before)

    assert last_move(10, 0.1) < 0.3 and last_move(5, 0.1) > 100
    with caplog.at_level(logging.WARNING):
        for participants in (10, 5):
            assert not caplog.records
            hundred = Federation([(torch.randn(2, 3), torch.tensor([0, 1]))] * 100, classes=2)
            e = Experiment(participation=f"uniform({participants})")
            FedInit(0.1).check(assemble(e, hundred, nn.Linear(3, 2)))
    assert "beta < 0.053" in caplog.text


@pytest.mark.parametrize(("part", "remedy"), [("scaffold", "momentum_corrected=True"), ("fedmoswa", "option=1")])
def test_control_variates_beside_momentum_warn_unless_they_allow_for_it(
    part: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run_library(make_world(NET, momentum=0.9), f"{part}({remedy})")
        assert not caplog.records
        run_library(make_world(NET, momentum=0.9), part)
    assert "up to 10 times" in caplog.text and remedy in caplog.text


def test_fedntd_needs_three_classes_and_labels() -> None:
    two = Federation([(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 2, classes=2)
    with pytest.raises(InputError, match="fedntd: with 2 classes"):
        run_digits_on(two, "fedntd", nn.Linear(3, 2))
    with pytest.raises(InputError, match="fedntd works on classes"):
        run_library(make_world(NET), "fedntd")


def run_digits_on(federation: Federation, method: str, model: nn.Module, **given: Any) -> Any:
    fields: dict[str, Any] = {"rounds": 1, "participation": "all", "local_epochs": 1, "weight_decay": 0.0}
    experiment = Experiment(method=method, backend="serial", **fields)
    return run(experiment, federation=federation, model=model, progress=False, **given)


def test_fedlc_refuses_a_loss_of_ones_own() -> None:
    three = Federation([(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))] * 2, classes=3)
    with pytest.raises(InputError, match="fedlc changes the logits"):
        run_digits_on(three, "fedlc", nn.Linear(3, 3), loss=nn.CrossEntropyLoss(label_smoothing=0.1))


def test_fedlc_stands_still_where_clients_have_one_class_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    x, model = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), nn.Linear(3, 3)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    single = Federation([(x, torch.full((4,), label)) for label in range(3)], classes=3)
    assert run_digits_on(single, "fedlc", model).server_weights.equal(before)
    assert "of 3 clients that were looked at, 3 have samples of one class only" in caplog.text
    caplog.clear()
    mixed = Federation([(x, torch.tensor([0, 1, 2, label])) for label in range(3)], classes=3)
    assert not run_digits_on(mixed, "fedlc", model).server_weights.equal(before)
    run_digits_on(single, "fedlc(tau=0.0)", model)
    assert not caplog.text


def test_fedlc_looks_at_a_few_clients_of_a_million() -> None:
    """Spread over all of them, and, where labels are in no tensor, at a few samples."""
    seen = []

    class Watched:
        def __init__(self, client: int) -> None:
            seen.append(client)

        def __len__(self) -> int:
            return 1000

        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            assert len(indices) <= 20
            return torch.zeros(len(indices), 3), indices // 500  # sorted by class

    class Many(Sequence[Any]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, client: Any) -> Any:
            return Watched(client)

    federation = Federation(Many(), sizes=np.full(1_000_000, 1000), classes=3)
    setup = assemble(Experiment(method="fedlc", participation="uniform(2)"), federation, nn.Linear(3, 3))
    seen.clear()
    assert of_one_class(setup) == (0, 10)
    assert len(seen) == 10 and min(seen) == 0 and max(seen) == 999_999


@pytest.mark.parametrize(("size", "what"), [(4.0, "overflow"), (0.1, "vanish")])
def test_qfedavg_refuses_a_q_that_leaves_the_range_of_the_numbers(size: float, what: str) -> None:
    """F = size²/2, so that F^100 is 8^100 ≈ 2e90 or 0.005^100 ≈ 1e-230: too much for float32, not for float64."""
    zero = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(zero.weight)
    clients = Federation([(torch.ones(4, 1), torch.full((4, 1), size))] * 2)
    fields: dict[str, Any] = {"rounds": 1, "participation": "all", "local_epochs": 1, "weight_decay": 0.0, "lr": 0.1}

    def moved(dtype: str) -> float:
        experiment = Experiment(method="qfedavg(q=100.0)", backend="serial", dtype=dtype, **fields)
        return float(run(experiment, federation=clients, model=zero, loss=halves, progress=False).server_weights)

    with pytest.raises(
        InputError, match=f"qfedavg: q=100 makes updates {what} in float32.*smaller q, or dtype='float64'"
    ):
        moved("float32")
    loss, step = size**2 / 2, 0.1 * size
    assert moved("float64") == pytest.approx(step * loss / (loss + 100 * step**2 / 0.1))


def halves(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).square().mean()


def test_qfedavg_lets_clients_that_fit_stand_still() -> None:
    """(1e-10)^5 is 0 in float32, but there is nothing to learn."""
    fitting = Federation([(torch.eye(3), torch.arange(3))] * 2, classes=3)
    certain = nn.Linear(3, 3, bias=False)
    certain.weight.data.copy_(200 * torch.eye(3))
    found = run_digits_on(fitting, "qfedavg(q=5.0)", certain)
    assert found.server_weights.equal(certain.weight.data.flatten())


@pytest.mark.parametrize("part", ["fedacg", "fedsmoo", "fedgloss", "fedswa", "fedmoswa", "fedexp", "qfedavg", "ifca"])
def test_a_server_rate_is_refused_by_a_part_with_a_server_step_of_its_own(part: str) -> None:
    with pytest.raises(InputError, match=rf"{part}.*server_lr"):
        run_library(make_world(NET, server_lr=0.5), part)


def test_a_name_of_a_sum_refuses_what_its_parts_refuse() -> None:
    for text, field in [
        ("fedgamma(rho=-1.0)", "rho"),
        ("fednsam(gamma=1.0)", "lam"),
        ("fedlesam_d(alpha=-1.0)", "alpha"),
    ]:
        with pytest.raises(InputError, match=field):
            Method.parse(text)
    with pytest.raises(InputError, match="rho"):
        Method.parse("fedgamma(roh=0.1)")
    with pytest.raises(InputError, match=r"twice.*'fedgamma' is sam\+scaffold"):
        Method.parse("fedgamma+scaffold")


def test_states_of_a_sum_are_those_of_its_parts() -> None:
    world = make_world(NET, **HARD)
    assert_same_bits(run_library(world, "fedlesam_s(rho=0.1)"), run_library(world, "scaffold+fedlesam(rho=0.1)"))
