"""The identities that the methods' formulas imply (spec §2 and §8), each as a fact about the library's runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import Local, Part, register
from fedflat.runs.result import Run

from . import reference as ref
from .harness import (
    EQUAL,
    PARTIAL,
    REGIMES,
    UNEQUAL,
    Trajectory,
    assert_agrees,
    assert_close,
    assert_same_bits,
    distance,
    make_world,
    module_of,
    run_library,
    weights_of,
    with_weights,
)
from .reference import Array, Linear, Mlp, World

MINIBATCHES = REGIMES["minibatches, unequal sizes, some take part, lr decays"]
EVERYTHING = REGIMES["Nesterov, weight decay, clip, unequal sizes, some take part"]
HARD = {"sizes": UNEQUAL, "participants": PARTIAL, "steps": 5, "batch": 3}


def linear_loss(output: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient is the same everywhere."""
    return (output * y).sum(1).mean()


def both(world: World, left: str, right: str, **changes: Any) -> tuple[Run, Run]:
    return run_library(world, left, **changes), run_library(world, right, **changes)


def path(world: World, method: str, **changes: Any) -> list[Array]:
    """The weights the server sends, round by round, and the last ones."""
    trajectory = Trajectory()
    run_library(world, method, callbacks=[trajectory], **changes)
    return trajectory.points


# ---- FedAvg ----


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavg_with_one_client_is_centralised_sgd(nesterov: bool) -> None:
    world = make_world(sizes=(7,), participants=((0,),), steps=None, epochs=3, batch=2)
    world = world.but(momentum=0.9, nesterov=nesterov, weight_decay=0.02)
    module = module_of(world)
    sgd = torch.optim.SGD(module.parameters(), lr=world.lr, momentum=0.9, nesterov=nesterov, weight_decay=0.02)
    for x, y in world.minibatches(0, 0):
        sgd.zero_grad()
        (0.5 * ((module(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).sum(1).mean()).backward()
        sgd.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert_close(run_library(world, "fedavg").server_weights, expected, 1e-13)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "scaffold(option=1)"])
def test_one_full_batch_step_with_plain_means_is_gradient_descent_on_the_mean_loss(method: str) -> None:
    world = make_world(sizes=UNEQUAL, steps=1)
    w = world.start
    for _ in world.participants:
        w = w - world.lr * np.mean([world.loss_gradient(i, w) for i in range(4)], axis=0)
    assert_close(run_library(world, method, weighting="uniform").server_weights, w)


def test_clients_with_the_same_data_return_the_same_model() -> None:
    world = make_world()
    alike = world.but(data=[world.data[0]] * 4)
    alone = world.but(data=[world.data[0]], participants=((0,),) * 4)
    assert_close(run_library(alike, "fedavg").server_weights, run_library(alone, "fedavg").server_weights, 1e-13)


def test_two_epochs_are_twice_the_steps_of_one() -> None:
    world = make_world(sizes=UNEQUAL, batch=3, steps=None, epochs=2)
    rows = run_library(world, "fedavg").clients
    assert {(row["samples"], row["steps"]) for row in rows} == {(4, 4), (9, 6), (5, 4), (7, 6)}


# ---- proximal term ----


def test_many_steps_of_fedprox_solve_the_proximal_problem() -> None:
    world = make_world(sizes=(9,), participants=((0,),), steps=1500, lr=0.2)
    a, b = world.net.quadratic(*world.data[0])
    mu, identity = 0.5, np.eye(world.net.size)
    solution = np.linalg.solve(a + mu * identity, b + mu * world.start)
    assert_close(run_library(world, f"fedprox(mu={mu})").server_weights, solution)


# ---- server optimisers ----


def test_fedavgm_under_a_constant_update_tends_to_steps_longer_by_1_over_1_minus_beta() -> None:
    world = make_world(participants=((0, 1, 2, 3),) * 60, steps=1, server_lr=0.5)
    points = path(world, "fedavgm(beta=0.6)", loss=linear_loss)
    update = (points[1] - points[0]) / 0.5
    assert_close(points[-1] - points[-2], 0.5 * update / (1 - 0.6))


def test_heavy_ball_is_the_moving_average_form_at_another_server_rate() -> None:
    world = make_world(**HARD)
    run = run_library(world.but(server_lr=0.7 * (1 - 0.6)), "fedavgm(beta=0.6)")
    assert_close(run.server_weights, ref.fedavgm(world.but(server_lr=0.7), 0.6, ema=True).w)


@pytest.mark.parametrize(
    "method", ["fedadam(beta1=0.0, tau={tau}, v_init=0.0)", "fedyogi(beta1=0.0, tau={tau}, v_init=0.0)"]
)
def test_adaptive_servers_with_a_large_tau_are_fedavg_at_server_rate_eta_over_tau(method: str) -> None:
    world, tau, c = make_world(**HARD), 1e12, 0.8
    run = run_library(world.but(server_lr=c * tau), method.format(tau=tau))
    assert_close(run.server_weights, run_library(world.but(server_lr=c), "fedavg").server_weights, 1e-9)


def test_fedadagrad_under_a_constant_update_slows_down_as_the_root_of_the_round() -> None:
    world = make_world(steps=1, server_lr=0.3)
    plain = path(world, "fedavg", loss=linear_loss)
    update, tau = (plain[1] - plain[0]) / 0.3, 0.05
    points = path(world, f"fedadagrad(tau={tau}, v_init=0.0)", loss=linear_loss)
    for t in range(len(world.participants)):
        assert_close(points[t + 1] - points[t], 0.3 * update / (np.abs(update) * np.sqrt(t + 1) + tau))


@pytest.mark.parametrize(("v_init", "sign"), [(100.0, -1), (0.0, 1)])
def test_fedyogi_moves_v_by_exactly_the_squared_update_times_1_minus_beta2(v_init: float, sign: int) -> None:
    world = make_world(participants=((0, 1, 2, 3),), server_lr=1.0)
    update = weights_of(run_library(world, "fedavg")) - world.start
    v = run_library(world, f"fedyogi(beta2=0.9, v_init={v_init})").server_state["fedyogi"]["v"]
    assert_close(v.numpy() - v_init, sign * (1 - 0.9) * update**2, 1e-9)


# ---- SCAFFOLD ----


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("regime", REGIMES)
def test_scaffold_keeps_the_servers_variate_at_the_mean_over_all_clients(regime: str, option: int) -> None:
    run = run_library(make_world(**REGIMES[regime]), f"scaffold(option={option})")
    zero = torch.zeros_like(run.server_weights)
    mean = sum(run.client_state(i).get("scaffold", {"c": zero})["c"] for i in range(4)) / 4
    assert_close(run.server_state["scaffold"]["c"], mean)


def test_scaffold_option_2_keeps_the_mean_of_the_raw_gradients_along_the_path() -> None:
    world = make_world(sizes=UNEQUAL, batch=3, participants=((0, 1, 2, 3),) * 3)
    seen: dict[int, list[Array]] = {}
    current = [0]

    def noted(f: ref.Gradient, w: Array) -> Array:
        seen.setdefault(current[0] // 3, []).append(f(w))
        current[0] += 1
        return f(w)

    ref.scaffold(world.but(rule=noted))
    run = run_library(world, "scaffold")
    for i in range(4):
        assert_close(run.client_state(i)["scaffold"]["c"], np.mean(seen[8 + i], axis=0))


def test_scaffold_options_coincide_for_one_full_batch_step() -> None:
    world = make_world(sizes=UNEQUAL, participants=PARTIAL, steps=1, lr_decay=0.9)
    first, second = both(world, "scaffold(option=1)", "scaffold(option=2)")
    assert_close(first.server_weights, second.server_weights)
    assert_close(first.server_state["scaffold"]["c"], second.server_state["scaffold"]["c"])


def test_scaffold_option_1_keeps_the_clients_full_gradient_at_the_received_weights_without_weight_decay() -> None:
    world = make_world(**EVERYTHING)
    run, sent = run_library(world, "scaffold(option=1)"), path(world, "scaffold(option=1)")
    last = {i: t for t, chosen in enumerate(PARTIAL) for i in chosen}
    for i, t in last.items():
        assert_close(run.client_state(i)["scaffold"]["c"], world.loss_gradient(i, sent[t]))


def test_scaffold_in_its_first_round_is_fedavg_with_plain_means() -> None:
    world = make_world(**(HARD | {"participants": PARTIAL[:1]}))
    assert_close(*(r.server_weights for r in both(world, "scaffold", "fedavg", weighting="uniform")), 1e-13)


# ---- FedDyn, FedDC, FedSpeed ----


@pytest.mark.parametrize("participants", [PARTIAL, ((0, 1, 2, 3),) * 4])
def test_feddyn_in_the_papers_form_and_in_the_codes_form_agree(participants: Any) -> None:
    world = make_world(sizes=EQUAL, participants=participants, batch=4, momentum=0.5, weight_decay=0.01)
    assert_agrees(run_library(world, "feddyn(alpha=0.3)"), ref.feddyn_paper(world, 0.3), "feddyn")


@pytest.mark.parametrize("chosen", [(0, 2), (0, 1, 2, 3)])
def test_feddyn_with_alpha_to_0_extrapolates_the_first_mean_and_is_not_fedavg(chosen: tuple[int, ...]) -> None:
    world = make_world(sizes=UNEQUAL, participants=(chosen,))
    mean = weights_of(run_library(world, "fedavg", weighting="uniform"))
    run = run_library(world, "feddyn(alpha=1e-13)")
    assert_close(run.server_weights, mean + len(chosen) / 4 * (mean - world.start))
    assert distance(run.server_weights, mean) > 1e-3


def test_feddyn_divides_the_drift_by_all_clients_not_by_the_participants() -> None:
    run = run_library(make_world(**HARD), "feddyn(alpha=0.2)")
    total = sum(run.client_state(i)["feddyn"]["h"] for i in range(4))
    assert_close(run.server_state["feddyn"]["h"], total / 4)


@pytest.mark.parametrize("method", ["feddyn(alpha=0.5)", "feddc(alpha=0.5)", "fedspeed(rho=0.0, alpha=0.5)"])
def test_the_fixed_point_of_dynamic_methods_is_a_stationary_point_of_the_mean_loss(method: str) -> None:
    world = make_world(sizes=(20,) * 4, participants=((0, 1, 2, 3),) * 100, steps=4, lr=0.3)
    run = run_library(world, method)
    gradients = [world.loss_gradient(i, weights_of(run)) for i in range(4)]
    assert np.linalg.norm(np.sum(gradients, axis=0)) < 1e-8
    assert min(np.linalg.norm(g) for g in gradients) > 0.1
    part = method.split("(")[0]
    assert run.server_state[part]["h"].norm() < 1e-8
    if part != "feddc":
        for i, gradient in enumerate(gradients):
            assert_close(-0.5 * run.client_state(i)[part]["h"], gradient, 1e-8)


def test_the_references_feddc_is_feddyn_plus_scaffold() -> None:
    for regime in REGIMES.values():
        world = make_world(**regime)
        assert_close(ref.feddc(world, 0.3, gradient_term=False).w, ref.feddyn(world, 0.3).w, 1e-13)
    world = make_world(**(EVERYTHING | {"sizes": EQUAL}))
    assert_close(ref.feddc(world, 0.0, drift_term=False).w, ref.scaffold(world).w, 1e-13)


def test_feddc_in_its_first_round_is_feddyn() -> None:
    world = make_world(**(HARD | {"participants": PARTIAL[:1]}))
    assert_close(*(r.server_weights for r in both(world, "feddc(alpha=0.3)", "feddyn(alpha=0.3)")), 1e-13)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("null", ["rho=0.0", "rho=0.4, mix=0.0"])
def test_fedspeed_without_its_look_ahead_is_feddyn(null: str, regime: str) -> None:
    left, right = both(make_world(**REGIMES[regime]), f"fedspeed({null}, alpha=0.2)", "feddyn(alpha=0.2)")
    assert torch.equal(left.server_weights, right.server_weights)


def test_fedspeeds_server_of_the_paper_is_that_of_the_code_only_when_everyone_takes_part() -> None:
    methods = "fedspeed(rho=0.1, alpha=0.2, server='paper')", "fedspeed(rho=0.1, alpha=0.2)"
    assert_close(*(r.server_weights for r in both(make_world(sizes=UNEQUAL), *methods)), 1e-13)
    paper, code = both(make_world(participants=PARTIAL), *methods)
    assert distance(paper.server_weights, code.server_weights) > 1e-3


# ---- clipping and the rate ----


@pytest.mark.parametrize("method", ["feddyn(alpha=0.2{})", "fedspeed(rho=0.1, alpha=0.2{})"])
def test_splitting_the_clip_matters_only_while_the_clip_is_active(method: str) -> None:
    split, whole = method.format(", clip_split=True"), method.format("")
    idle, busy = make_world(**HARD, clip=1e6), make_world(**HARD, clip=0.5)
    assert_close(*(r.server_weights for r in both(idle, split, whole)), 1e-12)
    left, right = both(busy, split, whole)
    assert distance(left.server_weights, right.server_weights) > 1e-3


@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=5.0)", "scaffold", "mofedsam", "adabest(mu=1.0)"])
def test_no_clipped_step_is_longer_than_lr_times_the_bound(method: str) -> None:
    world = make_world(sizes=(6, 6, 6, 6), steps=1, clip=0.05, participants=PARTIAL)
    rows = run_library(world, method).clients
    assert max(row["update_norm"] for row in rows) <= world.lr * 0.05
    assert max(row["update_norm"] for row in rows) > world.lr * 0.05 * 0.999


def test_an_inactive_clip_and_a_decay_of_one_change_no_bit() -> None:
    world = make_world(**HARD)
    assert_same_bits(run_library(world, "fedavg"), run_library(world.but(clip=1e9, lr_decay=1.0), "fedavg"))


def test_round_t_uses_the_first_rate_times_the_decay_to_the_t() -> None:
    world = make_world(lr=0.07, lr_decay=0.9, steps=1)
    rates = [row["lr"] for row in run_library(world, "fedavg").metrics]
    assert rates == [0.07 * 0.9**t for t in range(4)]
    moves = Trajectory()
    run_library(world, "fedavg", loss=linear_loss, callbacks=[moves])
    for t, move in enumerate(moves.moves):
        assert_close(move, moves.moves[0] * 0.9**t, 1e-12)


# ---- AdaBest ----


def test_adabest_extrapolates_from_one_mean_of_local_models_to_the_next() -> None:
    world, beta = make_world(**HARD), 0.7
    means: list[Array] = [world.start]
    points = []
    for rounds in range(1, len(PARTIAL) + 1):
        run = run_library(world.but(participants=PARTIAL[:rounds]), f"adabest(beta={beta}, mu=0.3)")
        means.append(run.server_state["adabest"]["mean"].numpy())
        points.append(weights_of(run))
    for point, old, new in zip(points, means, means[1:], strict=False):
        assert_close(point - new, beta * (new - old))


def test_adabest_under_full_participation_sums_the_pseudo_gradients() -> None:
    world, mu = make_world(sizes=UNEQUAL), 0.3
    gradients = np.zeros((4, world.net.size))
    for rounds in range(1, 5):
        part = world.but(participants=world.participants[:rounds])
        run = run_library(part, f"adabest(beta=0.0, mu={mu})", evaluated="all")
        sent = path(part, f"adabest(beta=0.0, mu={mu})")[-2]
        for i in range(4):
            gradients[i] += sent - run.client_state(i)["allclients"]["latest"].numpy()
    for i in range(4):
        assert_close(run.client_state(i)["adabest"]["h"], mu * gradients[i])


def test_adabests_two_conventions_for_h_agree() -> None:
    """Storing h without μ and multiplying by μ when it is used is the same."""
    world, beta, mu = make_world(**HARD), 0.7, 0.3
    w, mean, h, last = world.start, world.start, np.zeros((4, world.net.size)), dict[int, int]()
    for t, chosen in enumerate(world.participants):
        ends = {i: ref.descend(world, t, i, w, lambda g, at, i=i: g - mu * h[i])[0] for i in chosen}
        for i in chosen:
            h[i] = (h[i] / (t - last[i]) if i in last else 0) + w - ends[i]
            last[i] = t
        old, mean = mean, np.mean([ends[i] for i in chosen], axis=0)
        w = mean + beta * (mean - old)
    assert_close(run_library(world, f"adabest(beta={beta}, mu={mu})").server_weights, w)


# ---- FedNova ----


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_step_weight_has_a_closed_form(momentum: float) -> None:
    for k in (1, 2, 7):
        closed = (k - momentum * (1 - momentum**k) / (1 - momentum)) / (1 - momentum)
        assert np.isclose(ref.step_weight(k, momentum), closed, rtol=1e-13)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equally_many_steps_everywhere_is_fedavg(steps: int, momentum: float) -> None:
    world = make_world(**(HARD | {"steps": steps}), momentum=momentum)
    assert_close(*(r.server_weights for r in both(world, "fednova", "fedavg")), 1e-12)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": True}])
def test_fednova_takes_the_number_of_steps_out_of_the_direction(settings: dict[str, Any]) -> None:
    """Under constant gradients its direction is the sample-weighted mean gradient, however many steps each made."""
    world = make_world(sizes=UNEQUAL, batch=3, steps=None, epochs=2, participants=((0, 1, 2, 3),), **settings)
    common = world.but(data=[(x, np.broadcast_to(y[:1], y.shape).copy()) for x, y in world.data])
    flat = common.but(data=[(np.broadcast_to(x[:1], x.shape).copy(), y) for x, y in common.data])
    move = weights_of(run_library(flat, "fednova", loss=linear_loss)) - flat.start
    gradients = [np.concatenate([np.outer(y[0], x[0]).ravel(), y[0]]) for x, y in flat.data]
    mean = np.average(gradients, axis=0, weights=UNEQUAL)
    assert_close(-move / np.linalg.norm(move), mean / np.linalg.norm(mean))


# ---- SAM, ASAM, MoFedSAM ----


class Noting(nn.Module):
    """A module that notes the weights of every forward pass of training."""

    points: ClassVar[list[Array]] = []

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.points.append(nn.utils.parameters_to_vector(self.parameters()).detach().numpy().copy())
        return self.inner(x)


class Unnamed(nn.Module):
    """A linear map whose parameters are not called weight."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.offset = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix, self.offset)


def passes(world: World, method: str, **changes: Any) -> list[tuple[Array, Array]]:
    """Pairs of weights, before and after the ascent, of every local step of the first client."""
    Noting.points.clear()
    run_library(world, method, module=Noting(module_of(world)), **changes)
    return list(zip(Noting.points[::2], Noting.points[1::2], strict=True))


ONE = {"sizes": (6,), "participants": ((0,),)}


@pytest.mark.parametrize("method", ["sam(rho=0.3)", "mofedsam(rho=0.3, beta=0.5)", "fedspeed(rho=0.3)"])
def test_the_ascent_of_sam_has_length_rho(method: str) -> None:
    for here, there in passes(make_world(**ONE), method):
        assert np.isclose(np.linalg.norm(there - here), 0.3, rtol=1e-10)


def test_the_ascent_of_asam_has_length_rho_in_its_own_scale() -> None:
    world = make_world(**ONE)
    for here, there in passes(world, "asam(rho=0.3, eta=0.2)"):
        scale = np.where(world.net.is_weight, np.abs(here) + 0.2, 1.0)
        assert np.isclose(np.linalg.norm((there - here) / scale), 0.3, rtol=1e-10)


@pytest.mark.parametrize("method", ["sam(rho=0.3)", "asam(rho=0.3)", "mofedsam", "fedspeed(rho=0.3)"])
def test_the_weights_come_back_bit_for_bit_after_the_ascent(method: str) -> None:
    world = make_world(**ONE, lr=0.0, steps=5)
    assert all(np.array_equal(here, world.start) for here, _ in passes(world, method))


def test_sam_on_a_quadratic_follows_the_gradient_at_the_point_uphill() -> None:
    world = make_world(**ONE, steps=1)
    a, b = world.net.quadratic(*world.data[0])
    g = a @ world.start - b
    expected = world.start - world.lr * (a @ (world.start + 0.3 * g / np.linalg.norm(g)) - b)
    assert_close(run_library(world, "sam(rho=0.3)").server_weights, expected)


def test_a_zero_gradient_does_not_hurt_sam() -> None:
    world = make_world(**ONE)
    world = world.but(data=[(x, world.net.output(world.start, x)) for x, _ in world.data])
    for method in ("sam(rho=0.3)", "asam(rho=0.3)", "fedspeed(rho=0.3)"):
        assert_close(run_library(world, method).server_weights, world.start, 1e-6)


def test_asam_scales_only_parameters_called_weight() -> None:
    world = make_world(**EVERYTHING)
    module = with_weights(Unnamed(), world.start)
    left, right = both(world, "asam(rho=0.3, eta=0.2)", "sam(rho=0.3)", module=module)
    assert_close(left.server_weights, right.server_weights, 1e-12)


def test_asam_on_weights_of_one_size_is_sam_with_a_scaled_radius() -> None:
    world = make_world(**ONE, steps=1)
    signs = np.sign(world.start[:8]) * 0.6
    module = with_weights(nn.Linear(4, 2, bias=False), signs)
    left, right = both(world, "asam(rho=0.3, eta=0.2)", f"sam(rho={0.3 * 0.8})", module=module)
    assert_close(left.server_weights, right.server_weights)


def test_asams_ascent_does_not_see_how_two_relu_layers_share_their_scale() -> None:
    world = make_world(Mlp(3, 5, 2), **ONE, steps=1)
    weights = np.random.default_rng(5).normal(size=25)
    outputs = []
    for scale in (1.0, 7.0):
        scaled = weights * np.where(np.arange(25) < 15, scale, 1 / scale)
        net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False))
        Noting.points.clear()
        run_library(world, "asam(rho=0.3, eta=0.0)", module=Noting(with_weights(net, scaled)))
        outputs.append(with_weights(net, Noting.points[1])(torch.from_numpy(world.data[0][0])).detach())
    assert_close(outputs[1], outputs[0])


def test_mofedsam_with_beta_1_is_fedsam_with_plain_means() -> None:
    world = make_world(**EVERYTHING)
    left = run_library(world, "mofedsam(beta=1.0, rho=0.3)")
    assert_close(left.server_weights, run_library(world, "fedsam(rho=0.3)", weighting="uniform").server_weights, 1e-12)


def test_mofedsam_without_an_ascent_is_fedcm() -> None:
    world, beta = make_world(**EVERYTHING), 0.4
    w, m = world.start, np.zeros_like(world.start)
    for t, chosen in enumerate(world.participants):
        ends = {i: ref.descend(world, t, i, w, lambda g, at, m=m: beta * g + (1 - beta) * m)[0] for i in chosen}
        delta = np.mean([ends[i] - w for i in chosen], axis=0)
        w, m = w + delta, -delta / (5 * world.lr_in(t))
    assert_close(run_library(world, f"mofedsam(beta={beta}, rho=0.0)").server_weights, w)


def test_mofedsams_momentum_of_one_client_and_one_step_is_a_moving_average_of_gradients() -> None:
    world, beta = make_world(sizes=(6,), participants=((0,),) * 5, steps=1), 0.4
    points, m = path(world, f"mofedsam(beta={beta}, rho=0.0)"), np.zeros_like(world.start)
    for point in points[:-1]:
        m = beta * world.loss_gradient(0, point) + (1 - beta) * m
    assert_close(run_library(world, f"mofedsam(beta={beta}, rho=0.0)").server_state["mofedsam"]["m"], m)


# ---- buffers ----


@pytest.mark.parametrize(
    "method",
    ["sam(rho=0.3)", "asam(rho=0.3)", "mofedsam", "fedspeed(rho=0.3)", "moon(mu=1.0)", "man", "scaffold(option=1)"],
)
def test_further_passes_leave_running_statistics_alone(method: str) -> None:
    world = make_world(Mlp(3, 5, 2), **(HARD | {"batch": 0}), lr=0.0)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    left, right = (r.model.state_dict() for r in both(world, method, "fedavg", module=net))
    assert not torch.equal(left["1.running_mean"], torch.zeros(5, dtype=torch.float64))
    assert all(torch.equal(left[name], right[name]) for name in left)


# ---- MAN and MOON ----


def silent(output: Tensor, y: Tensor) -> Tensor:
    """A loss without a gradient: only added terms move the weights."""
    return (output * 0).sum()


def bias_free(weights: Array) -> nn.Module:
    layers = (nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU())
    return with_weights(nn.Sequential(*layers, nn.Linear(4, 2, bias=False)), weights)


def test_doubling_the_input_of_a_bias_free_relu_net_multiplies_man_by_four() -> None:
    world = make_world(Mlp(3, 5, 2), **ONE, steps=1)
    weights = np.random.default_rng(3).normal(size=43)
    twice = world.but(data=[(2 * x, y) for x, y in world.data])
    once, fourfold = (
        weights_of(run_library(at, "man(zeta=0.1)", module=bias_free(weights), loss=silent)) - weights
        for at in (world, twice)
    )
    assert np.linalg.norm(once) > 0
    assert_close(fourfold, 4 * once)


@register
@dataclass(frozen=True)
class Overheard(Part):
    """Takes the plain gradient and notes the loss it is the gradient of."""

    losses: ClassVar[list[float]] = []

    def gradient(self, local: Local, backward: Callable[[], Tensor]) -> None:
        self.losses.append(backward().item())


def losses(world: World, method: str, **changes: Any) -> list[float]:
    Overheard.losses.clear()
    run_library(world, f"{method}+overheard", **changes)
    return list(Overheard.losses)


def test_man_adds_zeta_times_the_mean_square_of_the_hidden_activations_to_the_loss() -> None:
    world = make_world(Mlp(3, 5, 2), **ONE, steps=1)
    features = world.net.features(world.start, world.data[0][0])
    assert losses(world, "man(zeta=0.5)", loss=silent) == pytest.approx([0.5 * np.mean(features**2)], rel=1e-12)
    constant = world.start.copy()
    constant[:15], constant[15:20] = 0.0, 0.8
    assert losses(world.but(start=constant), "man(zeta=0.5)", loss=silent) == pytest.approx([0.5 * 0.8**2], rel=1e-12)


def test_man_sums_over_every_hidden_layer() -> None:
    world = make_world(Mlp(3, 5, 2), **ONE, steps=1)
    weights = np.random.default_rng(3).normal(size=43)
    first, second = (torch.tensor(weights[a:b], requires_grad=True) for a, b in ((0, 15), (15, 35)))
    hidden = (torch.from_numpy(world.data[0][0]) @ first.view(5, 3).T).relu()
    term = 0.5 * (hidden.pow(2).mean() + (hidden @ second.view(4, 5).T).relu().pow(2).mean())
    term.backward()
    run = run_library(world, "man(zeta=0.5)", module=bias_free(weights), loss=silent)
    assert_close((weights - weights_of(run))[:35] / world.lr, torch.cat([first.grad, second.grad]))
    value = losses(world, "man(zeta=0.5)", module=bias_free(weights), loss=silent)
    assert value == pytest.approx([term.item()], rel=1e-12)


def test_moon_adds_mu_times_the_contrast_between_received_and_last_features_to_the_loss() -> None:
    world, mu, temperature = make_world(Mlp(3, 5, 2), sizes=(6,), participants=((0,), (0,)), steps=2), 2.0, 0.4
    sent = path(world, "moon(mu=2.0, temperature=0.4)")
    x, y = world.data[0]
    data = 0.5 * np.mean(np.sum((world.net.output(sent[1], x) - y) ** 2, axis=1))
    # one client: the received model is its own last one, so the two cosines are the same and the contrast is log 2
    values = losses(world, f"moon(mu={mu}, temperature={temperature})")
    assert values[2] == pytest.approx(data + mu * np.log(2), rel=1e-12)


def test_man_leaves_the_last_layer_alone() -> None:
    world = make_world(Mlp(3, 5, 2), **ONE)
    move = weights_of(run_library(world, "man(zeta=0.5)", loss=silent)) - world.start
    assert np.linalg.norm(move[:20]) > 0
    assert (move[20:] == 0).all()


def test_man_of_a_constant_activation_is_its_square() -> None:
    """The gradient of ζ·v² with respect to each of h biases of value v is 2ζv/h."""
    world = make_world(Mlp(3, 5, 2), **ONE, steps=1)
    start = world.start.copy()
    start[:15], start[15:20] = 0.0, 0.8
    move = weights_of(run_library(world.but(start=start), "man(zeta=0.5)", loss=silent)) - start
    assert_close(move[15:20], np.full(5, -world.lr * 0.5 * 2 * 0.8 / 5))


class Calling(nn.Module):
    """The same network with ReLU in another guise."""

    def __init__(self, relu: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.relu = nn.Linear(3, 5), nn.Linear(5, 2), relu

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.first(x)))


def in_place(x: Tensor) -> Tensor:
    """Changes its argument and returns it by another name."""
    x.relu_()
    return x


def by_keyword(x: Tensor) -> Tensor:
    return torch.relu(input=x)


@pytest.mark.parametrize(
    "relu",
    [nn.ReLU(), nn.ReLU(inplace=True), F.relu, torch.relu, Tensor.relu, torch.relu_, in_place, by_keyword],
    ids=["module", "in-place module", "F.relu", "torch.relu", "method", "torch.relu_", "in place", "by keyword"],
)
@pytest.mark.parametrize("ascent", ["", "+sam(rho=0.1)"])
def test_man_sees_every_guise_of_relu(relu: Callable[[Tensor], Tensor], ascent: str) -> None:
    world = make_world(Mlp(3, 5, 2), **EVERYTHING)
    run = run_library(world, "man(zeta=0.5)" + ascent, module=with_weights(Calling(relu), world.start))
    assert torch.equal(run.weights, run_library(world, "man(zeta=0.5)" + ascent).weights)


def test_man_measures_activations_before_they_are_pooled() -> None:
    x, y = torch.randn(6, 1, 6, 6, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64)
    world = make_world(sizes=(6,), participants=((0,),), steps=1)
    world = world.but(data=[(x.numpy(), y.numpy())])
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)).double()
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    run = run_library(world, "man(zeta=0.5)", module=net, loss=silent)
    conv = nn.Conv2d(1, 3, 3).double()
    conv.load_state_dict(net[0].state_dict())
    (0.5 * conv(x).relu().pow(2).mean()).backward()
    grad = nn.utils.parameters_to_vector(p.grad for p in conv.parameters())
    assert_close((start - run.server_weights)[: grad.numel()] / world.lr, grad)


def test_moon_at_first_participation_is_fedavg() -> None:
    world = make_world(Mlp(3, 5, 2), **(HARD | {"participants": ((0, 2), (1, 3))}), momentum=0.9)
    left, right = both(world, "moon(mu=5.0)", "fedavg")
    assert_close(left.server_weights, right.server_weights, 1e-12)


def test_moon_keeps_the_last_local_model_of_a_client_that_pauses() -> None:
    world = make_world(Mlp(3, 5, 2), **HARD)
    run = run_library(world, "moon(mu=1.0)", evaluated="all")
    for i in range(4):
        states = run.client_state(i)
        assert torch.equal(states["moon"]["previous"], states["allclients"]["latest"])


def test_moons_features_may_be_the_output_of_a_named_module() -> None:
    world = make_world(Mlp(3, 5, 2), **EVERYTHING)
    default, named = (run_library(world, "moon(mu=2.0)", features=f) for f in (None, "1"))
    assert torch.equal(default.weights, named.weights)


# ---- SWA ----


@pytest.mark.parametrize("same", ["cycle=1, lr_min=0.001", "cycle=3, lr_min=0.1"])
def test_swa_leaves_the_trajectory_alone_when_the_rate_does_not_cycle(same: str) -> None:
    world = make_world(sizes=UNEQUAL, participants=PARTIAL * 2, lr=0.1)
    left = path(world, f"swa(start=0.4, {same})")
    tolerance = 0.0 if "cycle=1" in same else 1e-13
    assert_close(np.array(left), np.array(path(world, "fedavg")), tolerance)


def test_swa_with_a_cycle_of_one_averages_from_the_second_round_after_its_start() -> None:
    world = make_world(participants=PARTIAL * 2)
    points = path(world, "fedavg")
    run = run_library(world, "swa(start=0.4, cycle=1)")
    assert_close(run.weights, np.mean(points[4 + 2 :], axis=0))
    assert int(run.server_state["swa"]["count"]) == 5


def test_swa_never_feeds_back_and_is_evaluated_only_from_its_start() -> None:
    world = make_world(participants=PARTIAL * 2)
    seen: list[bool] = []

    class Compare(Trajectory):
        def round(self, run: Run, metrics: Any) -> None:
            seen.append(torch.equal(run.weights, run.server_weights))

    run_library(world, "swa(start=0.5, cycle=2, lr_min=0.01)", callbacks=[Compare()])
    assert seen == [True] * 5 + [False] * 5


def test_swa_evaluates_the_model_it_began_with_until_it_has_collected_one() -> None:
    world = make_world(participants=PARTIAL)
    seen: list[Array] = []

    class Note(Trajectory):
        def round(self, run: Run, metrics: Any) -> None:
            seen.append(run.weights.numpy())

    run_library(world, "swa(start=0.4, cycle=2, lr_min=0.01)", callbacks=[Note()])
    sent = path(world, "swa(start=0.4, cycle=2, lr_min=0.01)")
    assert np.array_equal(seen[2], sent[2])
    assert np.array_equal(seen[3], sent[2])
    assert_close(seen[4], sent[5], 1e-15)


def test_algorithm_1s_counter_would_keep_three_quarters_on_the_start_copy() -> None:
    """Why the official counter, not that of the paper's Algorithm 1: there n starts at t0/c, not at 0."""
    cycle, first, rounds, weight = 10, 7500, 10000, 1.0
    n = first // cycle
    for _ in range(first + cycle, rounds + 1, cycle):
        weight *= n / (n + 1)
        n += 1
    assert weight == pytest.approx(0.75)


# ---- CONST ----


def channel_rows(vector: Array, net: Any) -> Array:
    return np.stack([vector[c] for c in net.channels])


CONST_WORLD = {"sizes": UNEQUAL, "participants": PARTIAL, "batch": 3, "steps": 5, "momentum": 0.9, "lr": 0.05}


@pytest.mark.parametrize("extra", ["", "+sam(rho=0.1)", "+scaffold", "+fedprox(mu=0.1)", "+fedavgm(beta=0.5)"])
def test_const_keeps_every_channels_update_free_of_its_mean_and_of_its_direction(extra: str) -> None:
    world = make_world(**CONST_WORLD, weight_decay=0.05)
    points = path(world, "const" + extra)
    for before, after in pairwise(points):
        move, origin = channel_rows(after - before, world.net), channel_rows(before, world.net)
        # a server with momentum repeats older updates, which are orthogonal to older weights
        assert np.abs(move.sum(1)).max() <= 1e-10
        if "fedavgm" not in extra:
            assert np.abs((move * origin).sum(1)).max() <= 1e-10
            grown = (channel_rows(after, world.net) ** 2).sum(1)
            assert np.allclose(grown, (origin**2).sum(1) + (move**2).sum(1), rtol=1e-10)
        assert np.linalg.norm(move) > 1e-3


@pytest.mark.parametrize(("text", "sums", "inner"), [("center=False", False, True), ("orthogonal=False", True, False)])
def test_each_ablation_of_const_keeps_exactly_one_of_the_two(text: str, sums: bool, inner: bool) -> None:
    world = make_world(**CONST_WORLD, weight_decay=0.05)
    points = path(world, f"const({text})")
    move, origin = channel_rows(points[1] - points[0], world.net), channel_rows(points[0], world.net)
    assert bool(np.abs(move.sum(1)).max() <= 1e-10) is sums
    assert bool(np.abs((move * origin).sum(1)).max() <= 1e-10) is inner


def test_const_holds_in_single_precision_on_convolutions_and_leaves_vectors_free() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    world = make_world(sizes=(12,), participants=((0,),), steps=8, momentum=0.9, weight_decay=1e-2)
    x, y = torch.randn(12, 2, 6, 6), torch.randn(12, 5)
    world = world.but(data=[(x.numpy(), y.numpy())])
    run = run_library(world, "const+sam(rho=0.05)", module=net, dtype="float32")
    for (name, old), new in zip(net.named_parameters(), run.model.parameters(), strict=True):
        move = (new - old).detach().reshape(len(old), -1)
        assert move.norm() > 0
        if old.dim() >= 2:
            rows = old.detach().reshape(len(old), -1)
            size = move.norm(dim=1)
            assert (move.sum(1).abs() <= 1e-5 * size * rows.shape[1] ** 0.5).all(), name
            assert ((move * rows).sum(1).abs() <= 1e-5 * size * rows.norm(dim=1)).all(), name


def functional(net: Linear, direction: Array) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss ⟨direction, weights⟩, from the outputs at the unit vectors and at zero; y says which is which."""
    weight, bias = (torch.from_numpy(part) for part in net.split(direction))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        output = output[y[:, 0].argsort()]
        return (weight.T * (output[:4] - output[4])).sum() + (bias * output[4]).sum()

    return loss


def test_the_projector_is_idempotent_symmetric_and_spares_the_bias() -> None:
    """One step from the origin moves by the projected gradient: read the projector off, direction by direction."""
    world = make_world(**ONE, steps=1, lr=1.0)
    probe = world.but(data=[(np.vstack([np.eye(4), np.zeros(4)]), np.arange(5.0)[:, None])])
    columns = []
    for direction in np.eye(world.net.size):
        run = run_library(probe, "const", loss=functional(world.net, direction))
        columns.append(world.start - weights_of(run))
    projector = np.stack(columns, axis=1)
    assert_close(projector @ projector, projector)
    assert_close(projector.T, projector)
    assert_close(projector[8:, 8:], np.eye(2))
    assert np.isclose(np.trace(projector), 2 * (4 - 2) + 2)


def test_with_weight_decay_const_is_const_with_a_proximal_pull() -> None:
    world = make_world(Linear(4, 2), **CONST_WORLD)
    weights = with_weights(nn.Linear(4, 2, bias=False), world.start[:8])
    left = run_library(world.but(weight_decay=0.2), "const", module=weights)
    assert_close(left.server_weights, run_library(world, "const+fedprox(mu=0.2)", module=weights).server_weights)


def test_projecting_gradients_or_displacements_is_the_same_without_weight_decay() -> None:
    world = make_world(**CONST_WORLD)
    project = ref.projected(world.net.channels)
    w = world.start
    for t, chosen in enumerate(world.participants):
        ends = {i: ref.descend(world, t, i, w, lambda g, at, w=w: project(w + g, w) - w)[0] for i in chosen}
        w = world.mean(chosen, ends, uniform=False)
    assert_close(run_library(world, "const").server_weights, w)


def test_the_sphere_puts_every_channel_at_norm_root_two_with_mean_zero() -> None:
    world = make_world(**(CONST_WORLD | ONE))
    rows = channel_rows(weights_of(run_library(world, "const(mode='sphere')")), world.net)
    assert np.allclose(np.linalg.norm(rows, axis=1), np.sqrt(2), rtol=1e-12)
    assert np.abs(rows.sum(1)).max() <= 1e-12


def test_const_may_start_from_centred_channels_of_norm_root_two() -> None:
    world = make_world(**(CONST_WORLD | {"lr": 0.0}))
    rows = channel_rows(weights_of(run_library(world, "const(init=True)")), world.net)
    start = channel_rows(world.start, world.net)
    centred = start - start.mean(1, keepdims=True)
    assert_close(rows, np.sqrt(2) * centred / np.linalg.norm(centred, axis=1, keepdims=True))


@pytest.mark.parametrize("mode", ["linear", "sphere"])
def test_const_skips_channels_with_fewer_than_three_inputs(mode: str) -> None:
    world = make_world(Mlp(2, 5, 2), **CONST_WORLD)
    constraint = (ref.projected if mode == "linear" else ref.sphere)(world.net.channels)
    result = ref.fedavg(world.but(constraint=constraint))
    assert_close(run_library(world, f"const(mode={mode!r})").server_weights, result.w)
