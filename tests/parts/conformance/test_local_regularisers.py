"""FedAlign and GradAug against whole losses written out here in float64, and both beside other parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models.test_slim import kept, leading, small, thin
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Experiment, Federation, InputError, Local, Part
from fedflat.core.method import Method
from fedflat.core.part import Backward
from fedflat.core.streams import isolated
from fedflat.runs.result import Run, load_run
from fedflat.runs.runner import run

from .harness import StopAfter, assert_same_bits
from .parts import IMAGE_PARTS, PARTS, Listed

CLASSES = 4
FAMILY = "resnet56(blocks=1, width=8)"  # of stages with 32, 64 and 128 channels


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, size: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, size, size, generator=draws(seed), dtype=torch.float64)
    return x, torch.arange(count) % CLASSES


def one_client(count: int = 6, size: int = 16) -> Federation:
    return Federation([pictures(count, size)], test=pictures(4, size, 9))


def resnet() -> nn.Module:
    return small(FAMILY, (3, 16, 16), CLASSES)


def settings(method: str, **changes: Any) -> Experiment:
    """Steps on the client's whole data, in double precision."""
    fields: dict[str, Any] = {
        "method": method,
        "rounds": 1,
        "local_steps": 1,
        "batch_size": 0,
        "lr": 0.05,
        "lr_decay": 1.0,
        "weight_decay": 0.0,
        "clip": None,
        "participation": "all",
        "dtype": "float64",
        "backend": "serial",
    }
    return Experiment(**(fields | changes))


def go(method: str, federation: Federation | None = None, model: nn.Module | None = None, **changes: Any) -> Run:
    out, loss, calls = changes.pop("out", None), changes.pop("loss", None), changes.pop("callbacks", ())
    return run(
        settings(method, **changes),
        federation=federation or one_client(),
        model=model or resnet(),
        loss=loss,
        out=out,
        callbacks=calls,
        progress=False,
    )


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def buffers(module: nn.Module) -> Tensor:
    return flat(buffer.double() for buffer in module.buffers())


def sgd(net: nn.Module, loss: Callable[[nn.Module], Tensor], e: Experiment) -> nn.Module:
    """The net after the experiment's local steps on `loss`, by PyTorch's own optimiser and clip."""
    descent = {"lr": e.lr, "momentum": e.momentum, "nesterov": e.nesterov, "weight_decay": e.weight_decay}
    optimiser = torch.optim.SGD(net.parameters(), **descent)
    for _ in range(e.local_steps or 0):
        optimiser.zero_grad()
        loss(net).backward()
        if e.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), e.clip)
        optimiser.step()
    return net


@fedflat.register
@dataclass(frozen=True)
class Ledger(Part):
    """Takes the plain gradient and notes the losses of the first step: of the data alone, and all that was added."""

    def gradient(self, local: Local, backward: Backward) -> None:
        total = backward()
        assert local.data_loss is not None
        values = torch.stack([local.data_loss.detach(), total])
        local.state(self).setdefault("losses", values.double().clone())


def losses(method: str, **changes: Any) -> tuple[float, float]:
    """Data loss and penalty of the first step."""
    data, total = go(f"{method}+ledger", **changes).client_state(0)["ledger"]["losses"].tolist()
    return data, total - data


# ---- FedAlign: the whole loss, written out ----


def stage(net: nn.Module, x: Tensor, width: float, divisor: int) -> Tensor:
    """The last stage of the small network, one bottleneck, on leading slices of its weights."""
    p = dict(net.get_submodule("layer3").named_parameters())

    def layer(h: Tensor, conv: str, norm: str, stride: int = 1, padding: int = 0) -> Tensor:
        weight = p[f"0.{conv}.weight"]
        outputs = kept(width, len(weight), divisor)
        h = F.conv2d(h, weight[:outputs, : h.shape[1]], stride=stride, padding=padding)
        scale, shift = p[f"0.{norm}.weight"][:outputs], p[f"0.{norm}.bias"][:outputs]
        return F.batch_norm(h, None, None, scale, shift, training=True)

    h = layer(x, "branch.conv1", "branch.norm1").relu()
    h = layer(h, "branch.conv2", "branch.norm2", stride=2, padding=1).relu()
    h = layer(h, "branch.conv3", "branch.norm3")
    return (h + layer(x, "shortcut.conv", "shortcut.norm", stride=2)).relu()


def transmitting(u: Tensor, v: Tensor) -> Tensor:
    if u.shape[2] > v.shape[2]:
        u = F.adaptive_avg_pool2d(u, v.shape[2:])
    return torch.einsum("bchw,bdhw->bcd", u, v) / (v.shape[2] * v.shape[3])


def spectral_norm(x: Tensor, iterations: int) -> Tensor:
    gram = x @ x.transpose(1, 2)
    v = torch.ones(*gram.shape[:2], 1, dtype=x.dtype)
    for _ in range(iterations):
        m = gram @ v
        n = m.norm(dim=1, keepdim=True)
        v = m / n
    return n.sqrt().view(-1)


@dataclass(frozen=True)
class Align:
    """FedAlign's options, and its loss on the small network."""

    mu: float = 0.45
    width: float = 0.25
    objective: str = "official"
    slices: str = "sliced"
    iterations: int = 10
    divisor: int = 8

    def __str__(self) -> str:
        given = vars(self).items()
        return f"fedalign({', '.join(f'{k}={v!r}' for k, v in given if v != getattr(Align, k))})"

    def terms(self, net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """L_CE and L_Lip."""
        a = net.get_submodule("layer2")(net.get_submodule("layer1")(net.get_submodule("stem")(x)))
        b = net.get_submodule("layer3")(a)
        cross_entropy = F.cross_entropy(net.get_submodule("head")(b), y)
        a, b = a.detach(), b.detach()
        a_s = a[:, : kept(self.width, a.shape[1], self.divisor)]
        b_s = stage(net, a_s, self.width, self.divisor)
        full = spectral_norm(transmitting(a, b), self.iterations)
        left = a_s if self.slices == "sliced" else a
        sliced = spectral_norm(transmitting(left, b_s), self.iterations)
        return cross_entropy, (sliced - full).square().mean()

    def loss(self, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        cross_entropy, lipschitz = self.terms(net, x, y)
        scale = (cross_entropy / lipschitz).detach() if self.objective == "official" else 1.0
        return cross_entropy + self.mu * scale * lipschitz


ALIGNS = [
    Align(),
    Align(objective="paper"),
    Align(slices="full"),
    Align(mu=1.3, objective="paper", slices="full"),
    Align(iterations=2),
    Align(width=0.5),
    Align(width=0.3, divisor=1, objective="paper"),
    Align(width=0.8),
]


@pytest.mark.parametrize("align", ALIGNS, ids=str)
def test_fedaligns_local_steps_are_sgd_on_the_whole_loss(align: Align) -> None:
    """Three steps as in its experiments: Nesterov momentum, weight decay, clip on the sum."""
    changes: dict[str, Any] = {"local_steps": 3, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "clip": 1.0}
    result, (x, y) = go(str(align), **changes), pictures(6)
    net = sgd(resnet().train(), lambda net: align.loss(net, x, y), settings("fedavg", **changes))
    torch.testing.assert_close(result.server_weights, flat(net.parameters()), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(buffers(result.model), buffers(net), rtol=1e-8, atol=1e-10)  # of full passes only
    assert not torch.allclose(result.server_weights, go("fedavg", **changes).server_weights, rtol=1e-5)


@pytest.mark.parametrize("align", ALIGNS, ids=str)
def test_the_penalty_has_its_value(align: Align) -> None:
    """With the authors' objective it is μ·L_CE whatever the network; with the paper's, μ·L_Lip."""
    data, penalty = losses(str(align))
    cross_entropy, lipschitz = align.terms(resnet().train(), *pictures(6))
    assert data == pytest.approx(cross_entropy.item(), rel=1e-10)
    expected = align.mu * (cross_entropy if align.objective == "official" else lipschitz).item()
    assert penalty == pytest.approx(expected, rel=1e-8)


def test_shapes_are_those_the_paper_works_with() -> None:
    net, (x, _) = resnet().train(), pictures(2)
    a = net.get_submodule("layer2")(net.get_submodule("layer1")(net.get_submodule("stem")(x)))
    b, b_s = net.get_submodule("layer3")(a), stage(net, a[:, :16], 0.25, 8)
    assert transmitting(a, b).shape == (2, 64, 128)
    assert transmitting(a[:, :16], b_s).shape == (2, 16, 32)
    assert transmitting(a, b_s).shape == (2, 64, 32)


@pytest.mark.parametrize("objective", ["official", "paper"])
def test_at_full_width_there_is_nothing_to_align(objective: str) -> None:
    """L_Lip = 0, so neither weights nor statistics differ from FedAvg's."""
    assert losses(f"fedalign(width=1.0, objective='{objective}')")[1] == 0
    changes: dict[str, Any] = {"local_steps": 3}
    aligned, base = go(f"fedalign(width=1.0, objective='{objective}')", **changes), go("fedavg", **changes)
    torch.testing.assert_close(aligned.server_weights, base.server_weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(buffers(aligned.model), buffers(base.model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slices", ["sliced", "full"])
def test_only_leading_slices_of_the_last_stage_are_aligned(slices: str) -> None:
    """After one step without momentum every other weight is FedAvg's, bit for bit."""
    aligned, base = go(f"fedalign(mu=5.0, objective='paper', slices='{slices}')").model, go("fedavg").model
    quarter = dict(thin(resnet(), 0.25).named_parameters())
    moved = 0
    plainly = dict(base.named_parameters())
    for name, weights in aligned.named_parameters():
        differs = weights != plainly[name]
        if name.startswith("layer3."):
            inside = leading(differs, quarter[name].shape)
            moved += int(inside.sum())
            inside.fill_(False)
        assert not differs.any(), name
    assert moved > 0.5 * sum(p.numel() for name, p in quarter.items() if name.startswith("layer3."))


def test_without_strength_it_is_fedavg_bit_for_bit() -> None:
    aligned, base = go("fedalign(mu=0.0)", local_steps=3), go("fedavg", local_steps=3)
    assert torch.equal(aligned.weights, base.weights)
    assert torch.equal(buffers(aligned.model), buffers(base.model))


# ---- FedAlign on a model of the user's, in closed form ----


class Chain(nn.Module):
    """One-channel images x → a = α x → b = W a, no activations: transmitting matrices of rank 1."""

    def __init__(self, alpha: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, len(alpha), 1, bias=False)
        self.block = nn.Conv2d(len(alpha), len(weight), 1, bias=False)
        self.out = nn.Linear(len(weight), CLASSES)
        self.lift.weight.data = alpha.view(-1, 1, 1, 1)
        self.block.weight.data = weight[:, :, None, None]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.block(self.lift(x)).mean((2, 3)))
        return out


def chain() -> tuple[nn.Module, Tensor, Tensor]:
    alpha = torch.rand(16, generator=draws(1), dtype=torch.float64) + 0.1
    weight = torch.randn(32, 16, generator=draws(2), dtype=torch.float64)
    with isolated(0, "tests"):
        return Chain(alpha, weight).double(), alpha, weight


def grey(count: int = 5) -> Federation:
    x = torch.randn(count, 1, 6, 6, generator=draws(3), dtype=torch.float64)
    return Federation([(x, torch.arange(count) % CLASSES)])


def test_the_penalty_of_rank_one_features_in_closed_form() -> None:
    """X = α βᵀ mean x² with β = W α has spectral norm ‖α‖ ‖β‖ mean x², which power iteration finds exactly."""
    module, alpha, weight = chain()
    alpha_s, weight_s = alpha[:8], weight[:16, :8]
    gap = (alpha_s.norm() * (weight_s @ alpha_s).norm() - alpha.norm() * (weight @ alpha).norm()).item()
    energy = grey().samples(0).batch(torch.arange(5))[0].square().mean((1, 2, 3))
    expected = 0.45 * gap**2 * energy.square().mean().item()
    method = "fedalign(objective='paper', width=0.5)"
    assert losses(method, federation=grey(), model=module, last_stage="block")[1] == pytest.approx(expected, rel=1e-10)
    half = alpha.norm() * (weight_s @ alpha_s).norm() - alpha.norm() * (weight @ alpha).norm()
    method = "fedalign(objective='paper', width=0.5, slices='full')"
    assert losses(method, federation=grey(), model=module, last_stage="block")[1] == pytest.approx(
        0.45 * half.item() ** 2 * energy.square().mean().item(), rel=1e-10
    )


class Mixed(Chain):
    """As before, but with as many image channels as features: transmitting matrices of full rank, of mixed signs."""

    def __init__(self) -> None:
        super().__init__(torch.ones(16), torch.randn(32, 16))
        self.lift = nn.Conv2d(3, 16, 3, bias=False)


def test_many_power_iterations_give_the_largest_singular_value_and_few_never_more() -> None:
    with isolated(4, "tests"):
        module = Mixed().double()
    x, y = pictures(5, 8)
    a = module.lift(x)
    a_s, b = a[:, :8], module.block(a)
    b_s = F.conv2d(a_s, module.block.weight[:16, :8])
    exact, exact_s = (torch.linalg.matrix_norm(transmitting(*pair), 2) for pair in ((a, b), (a_s, b_s)))
    expected = (exact_s - exact).square().mean().item()
    method = "fedalign(objective='paper', mu=1.0, width=0.5, iterations=400)"
    found = losses(method, federation=Federation([(x, y)]), model=module, last_stage="block")[1]
    assert found == pytest.approx(expected, rel=1e-6)
    for iterations in (1, 2, 5, 10):
        full, sliced = (spectral_norm(transmitting(*pair), iterations) for pair in ((a, b), (a_s, b_s)))
        assert iterations == 1 or (full <= exact * (1 + 1e-12)).all()  # at first v is not yet a unit vector
        method = f"fedalign(objective='paper', mu=1.0, width=0.5, iterations={iterations})"
        found = losses(method, federation=Federation([(x, y)]), model=module, last_stage="block")[1]
        assert found == pytest.approx((sliced - full).square().mean().item(), rel=1e-8)


def test_the_declared_last_stage_can_be_named_too() -> None:
    named, declared = go("fedalign", last_stage="layer3"), go("fedalign")
    assert torch.equal(named.weights, declared.weights)
    assert not torch.equal(go("fedalign", last_stage="layer2").weights, declared.weights)


def test_a_model_without_stages_is_refused_with_a_remedy() -> None:
    module, _, _ = chain()
    with pytest.raises(InputError, match=r"fedalign.*last_stage"):
        go("fedalign", grey(), module)
    x, y = torch.randn(6, 5, generator=draws(), dtype=torch.float64), torch.arange(6) % CLASSES
    with pytest.raises(InputError, match=r"fedalign.*last_stage"):
        go("fedalign", Federation([(x, y)]), nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, CLASSES)).double())


# ---- GradAug ----


class Widths(nn.Module):
    """Convolutions of 50 channels; remembers channels and size of every training pass after the first of them."""

    passes: ClassVar[list[tuple[int, int]]] = []
    channels: ClassVar[int] = 50

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, self.channels, 3)
        self.second = nn.Conv2d(self.channels, self.channels, 3)
        self.out = nn.Linear(self.channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and torch.is_grad_enabled():
            Widths.passes.append((h.shape[1], x.shape[-1]))
        out: Tensor = self.out(self.second(h.relu()).relu().mean((2, 3)))
        return out


def widths() -> nn.Module:
    Widths.passes.clear()
    with isolated(0, "tests"):
        return Widths().double()


def resized(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, size), mode="bilinear", align_corners=True)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(q ‖ p), mean over the batch."""
    q = teacher.detach().softmax(1)
    return (q * (q.log() - student.log_softmax(1))).sum(1).mean()


def augmented(
    net: nn.Module, x: Tensor, y: Tensor, mu: float, draws: list[tuple[float, int]], divisor: int, **options: Any
) -> list[Tensor]:
    """Gradients of the terms, each computed alone: cross-entropy, then μ·KL of every sub-network."""
    scores = net(x)
    grads = [flat(torch.autograd.grad(F.cross_entropy(scores, y), list(net.parameters())))]
    for width, size in draws:
        student = thin(net, width, divisor, **options)
        term = mu * divergence(scores, student(resized(x, size)))
        pieces = torch.autograd.grad(term, list(student.parameters()))
        wide = [torch.zeros_like(p) for p in net.parameters()]
        for into, piece in zip(wide, pieces, strict=True):
            leading(into, piece.shape).copy_(piece)
        grads.append(flat(wide))
    return grads


@pytest.mark.parametrize(("mu", "width", "size", "divisor"), [(2.0, 0.8, 12, 8), (0.5, 0.5, 16, 8), (1.0, 0.7, 10, 1)])
def test_gradaugs_gradient_is_the_sum_of_its_terms_on_a_residual_network(
    mu: float, width: float, size: int, divisor: int
) -> None:
    """With one sub-network nothing is left to chance: it has the least width and the one resolution."""
    method = f"gradaug(mu={mu}, n=1, width={width}, resolutions=({size},), divisor={divisor})"
    result, (x, y) = go(method), pictures(6)
    net = resnet().train()
    terms = augmented(net, x, y, mu, [(width, size)], divisor)
    expected = flat(resnet().parameters()) - 0.05 * sum(terms)
    torch.testing.assert_close(result.server_weights, expected, rtol=1e-8, atol=1e-10)
    assert terms[1].norm() > 1e-3
    # `net` has seen one pass, at full width: only that one moves the statistics.
    torch.testing.assert_close(buffers(result.model), buffers(net), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("extra", ["", ", all_random=True"])
def test_gradaugs_gradient_is_the_sum_over_the_widths_it_draws(extra: str) -> None:
    """Divisor 1 and 50 channels in every layer: the channels of a pass tell its width."""
    method = f"gradaug(mu=1.25, n=4, width=0.4, resolutions=(8, 7, 6), divisor=1{extra})"
    federation, (x, y) = one_client(6, 8), pictures(6, 8)
    result = go(method, federation, widths())
    full, *rest = Widths.passes
    assert full == (50, 8) and len(rest) == 4
    options = {"first": "first", "whole": ("out",)}
    drawn = [(channels / 50, size) for channels, size in rest]
    net = widths()
    expected = flat(net.parameters()) - 0.05 * sum(augmented(net, x, y, 1.25, drawn, 1, **options))
    torch.testing.assert_close(result.server_weights, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("n", "all_random"), [(1, False), (2, False), (4, False), (3, True)])
def test_widths_and_resolutions_are_drawn_as_the_method_says(n: int, all_random: bool) -> None:
    steps = 60
    method = f"gradaug(n={n}, width=0.5, resolutions=(8, 7, 6), divisor=1, all_random={all_random})"
    go(method, one_client(2, 8), widths(), local_steps=steps, lr=0.0)
    passes = [Widths.passes[k * (n + 1) : (k + 1) * (n + 1)] for k in range(steps)]
    assert len(Widths.passes) == steps * (n + 1)
    for full, *rest in passes:
        assert full == (50, 8)
        channels = [count for count, _ in rest]
        assert channels == sorted(channels, reverse=True), "widest first"
        assert all(25 <= count <= 50 for count in channels)
        assert all_random or channels[-1] == 25
    free = [count for _, *rest in passes for count, _ in (rest if all_random else rest[:-1])]
    if free:
        mean, spread = sum(free) / len(free), 50 * 0.5 / 12**0.5 / len(free) ** 0.5
        assert abs(mean - 37.5) < 4 * spread
        assert len(set(free)) > 15
    sizes = [size for _, *rest in passes for _, size in rest]
    assert all(abs(sizes.count(size) / len(sizes) - 1 / 3) < 4 * (2 / 9 / len(sizes)) ** 0.5 for size in (8, 7, 6))


def test_sub_networks_as_large_as_the_whole_teach_nothing() -> None:
    """KL = 0 where the students are the teacher, and so is its gradient."""
    data, penalty = losses("gradaug(width=1.0, resolutions=(8,))", federation=one_client(6, 8), model=widths())
    assert abs(penalty) < 1e-14
    taught = go("gradaug(width=1.0, resolutions=(8,))", one_client(6, 8), widths(), local_steps=2)
    base = go("fedavg", one_client(6, 8), widths(), local_steps=2)
    torch.testing.assert_close(taught.server_weights, base.server_weights, rtol=1e-12, atol=1e-13)
    assert data > 0


def test_gradaug_without_strength_is_fedavg_bit_for_bit() -> None:
    taught, base = (go(m, local_steps=2) for m in ("gradaug(mu=0.0, resolutions=(16, 12))", "fedavg"))
    assert torch.equal(taught.weights, base.weights)
    assert torch.equal(buffers(taught.model), buffers(base.model))


def test_gradaug_wants_images() -> None:
    x, y = torch.randn(6, 5, generator=draws(), dtype=torch.float64), torch.arange(6) % CLASSES
    module = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, CLASSES)).double()
    with pytest.raises(InputError, match=r"gradaug.*image"):
        go("gradaug", Federation([(x, y)]), module)


# ---- both beside others ----


@pytest.mark.parametrize(
    ("part", "ascent"),
    [
        *product(["fedavg", "fedalign"], ["sam(rho=0.5)", "asam(rho=1.0)", "mofedsam(rho=0.5)", "fedspeed(rho=0.5)"]),
        *product(["gradaug(resolutions=(8, 6))", "mixup", "cutout(size=4)", "cutmix"], ["sam(rho=0.5)"]),
    ],
)
def test_the_perturbed_pass_never_moves_the_statistics(part: str, ascent: str) -> None:
    """With weights that stay they are those without the ascent."""
    changes: dict[str, Any] = {"lr": 0.0, "rounds": 1, "evaluate_every": 0}
    perturbed, base = (together(method, **changes) for method in (f"{part}+{ascent}", part))
    assert torch.equal(buffers(perturbed.model), buffers(base.model))


def test_a_perturbed_pass_with_dropped_blocks_moves_no_counter() -> None:
    model = go("stochdepth(keep=0.5)+sam(rho=0.5)", one_client(4, 8), tiny(), local_steps=4, lr=0.0).model
    counters = [int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert counters[0] == max(counters) == 4


COMBINATIONS = [
    "scaffold+mixup+asam(rho=0.2)",
    "fedavg+fedalign+swa(start=0.5, cycle=1)",
    "gradaug(resolutions=(8, 6))+feddyn(alpha=0.1)",
    "stochdepth(keep=0.5)+sam+man(zeta=0.01)",
    "cutmix+cutout(size=4)+mixup",
    "fedalign+gradaug(n=1, resolutions=(8,))+stochdepth+mixup+cutout(size=4)+scaffold+sam+swa(start=0.5, cycle=1)",
    "fedalign(objective='paper', slices='full')+moon+fedprox+cutmix",
]


@cache
def federation() -> Federation:
    return Federation([pictures(n, 8, n) for n in (6, 8, 5)], test=pictures(8, 8, 99))


ROUNDS: dict[str, Any] = {
    "rounds": 2,
    "batch_size": 3,
    "local_steps": 2,
    "lr": 0.02,
    "clip": 10.0,
    "momentum": 0.5,
    "weight_decay": 1e-3,
    "participation": "uniform(2)",
    "dtype": "float32",
}


def tiny() -> nn.Module:
    return small("resnet56(blocks=1, width=4)", (3, 8, 8), CLASSES)


def together(method: str, **changes: Any) -> Run:
    """Two rounds of minibatches, some of three clients, in single precision."""
    return go(method, federation(), tiny(), **(ROUNDS | changes))


@cache
def alone(method: str, weighting: str = "auto") -> Run:
    """The same, run once for all tests that compare with it."""
    return together(method, weighting=weighting)


def assert_same_results(left: Run, right: Run) -> None:
    assert_same_bits(left, right)
    assert torch.equal(buffers(left.model), buffers(right.model))
    assert [row["loss"] for row in left.metrics] == [row["loss"] for row in right.metrics]


@pytest.mark.parametrize("method", COMBINATIONS)
def test_a_combination_has_the_same_bits_everywhere_and_resumes_exactly(method: str, tmp_path: Path) -> None:
    whole = together(method)
    assert whole.weights.isfinite().all() and whole.metrics[-1]["left_out"] == 0
    for workers in (1, 2):
        assert_same_results(together(method, backend="pool", workers=workers), whole)
    together(method, out=tmp_path / "run", callbacks=[StopAfter(1)])
    assert_same_results(together(method, out=tmp_path / "run"), whole)
    assert_same_results(together("+".join(reversed(method.split("+")))), whole)


# ---- what every part must pass ----

every_part = pytest.mark.parametrize("part", IMAGE_PARTS, ids=str)


@pytest.mark.parametrize("part", [p for p in IMAGE_PARTS if p.null], ids=lambda p: p.null)
@pytest.mark.parametrize("base", ["fedavg", "scaffold+sam"])
def test_the_null_form_changes_no_bit(part: Listed, base: str) -> None:
    assert_same_results(together(f"{base}+{part.null}"), alone(base, "uniform" if part.uniform else "auto"))


@every_part
def test_its_effect_shows_and_is_the_same_in_single_and_in_double_precision(part: Listed) -> None:
    single, double, base = alone(part.text), together(part.text, dtype="float64"), alone("fedavg")
    assert not torch.allclose(single.weights, base.weights, rtol=1e-4)
    assert (single.weights.dtype, double.weights.dtype) == (torch.float32, torch.float64)
    assert torch.allclose(single.weights.double(), double.weights, rtol=1e-2, atol=1e-4)


@every_part
def test_it_keeps_nothing_and_sends_nothing_besides_the_model(part: Listed) -> None:
    mine, base = alone(part.text), alone("fedavg")
    assert not mine.server_state.get(part.name)
    assert not any(mine.client_state(i).get(part.name) for i in range(3))
    for field in ("floats_down", "floats_up", "steps"):
        assert [row[field] for row in mine.metrics] == [row[field] for row in base.metrics]


@every_part
def test_it_resumes_exactly_and_does_not_mind_workers(part: Listed, tmp_path: Path) -> None:
    whole = alone(part.text)
    together(part.text, out=tmp_path / "run", callbacks=[StopAfter(1)])
    assert_same_results(together(part.text, out=tmp_path / "run"), whole)
    assert_same_results(load_run(tmp_path / "run", model=tiny()), whole)
    assert_same_results(together(part.text, backend="pool", workers=2), whole)


@every_part
def test_its_text_describes_it(part: Listed) -> None:
    method = Method.parse(part.text)
    assert Method.parse(str(method)).parts == method.parts


def test_none_of_them_claims_what_only_one_can_have() -> None:
    defences = {"fltrust", "bucketing", "nnm"}  # they replace the mean of the updates, which other parts may need
    for part, other in product(IMAGE_PARTS, (*PARTS, *IMAGE_PARTS)):
        if part.name != other.name and defences.isdisjoint((part.name, other.name)):
            Method.parse(f"{part.text}+{other.text}")


def test_the_users_module_is_not_changed() -> None:
    module = resnet()
    before = copy.deepcopy(module.state_dict())
    go("fedalign+gradaug(resolutions=(16, 12))+stochdepth", model=module, local_steps=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in module.modules())


# ---- refused ----


@pytest.mark.parametrize(
    "text",
    [
        "fedalign(mu=-0.1)",
        "fedalign(width=0.0)",
        "fedalign(width=1.1)",
        "fedalign(objective='both')",
        "fedalign(slices='half')",
        "fedalign(iterations=0)",
        "fedalign(divisor=0)",
        "gradaug(mu=-1.0)",
        "gradaug(n=0)",
        "gradaug(n=1.5)",
        "gradaug(width=0.0)",
        "gradaug(width=1.2)",
        "gradaug(resolutions=())",
        "gradaug(resolutions=(0,))",
        "gradaug(divisor=0)",
    ],
)
def test_a_value_out_of_range_is_refused_naming_part_and_field(text: str) -> None:
    part, field = text.split("(")[0], text.split("(")[1].split("=")[0]
    with pytest.raises(InputError, match=rf"{part}.*{field}"):
        go(text)
