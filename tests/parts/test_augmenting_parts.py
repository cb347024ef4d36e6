"""Mixup, Cutout and CutMix: what reaches the model and the loss, as a model of the user's sees it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from helpers import flat, plain
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Federation, InputError
from fedflat.core import streams
from fedflat.data.preprocess import Preprocess

CLASSES = 3


class Witness(nn.Module):
    """A linear classifier that remembers every training batch it was shown."""

    seen: ClassVar[list[Tensor]] = []

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            Witness.seen.append(x.detach().clone())
        out: Tensor = self.linear(x.flatten(1))
        return out


def witness(features: int) -> nn.Module:
    Witness.seen.clear()
    with streams.isolated(0, "tests"):
        return Witness(features).double()


def labels(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def unit_vectors(count: int) -> Federation:
    """Sample i is the i-th unit vector, so that a mixture shows its own weights."""
    x = torch.eye(count, dtype=torch.float64)
    return Federation([(x, labels(count))], test=(x, labels(count)))


def flat_images(count: int, size: int = 8, channels: int = 2) -> Federation:
    """Image i has the value i + 1 everywhere."""
    x = torch.arange(1.0, count + 1, dtype=torch.float64).view(-1, 1, 1, 1).expand(-1, channels, size, size)
    return Federation([(x.contiguous(), labels(count))], test=(x.contiguous(), labels(count)))


def go(method: str, federation: Federation, model: nn.Module, **changes: Any) -> fedflat.Run:
    settings = {"method": method, "batch_size": 0, "local_steps": 1, "lr": 0.3}
    return fedflat.run(plain(**(settings | changes)), federation=federation, model=model, progress=False)


def order(count: int, seed: int = 0, round: int = 1, client: int = 0) -> Tensor:
    """The library's documented order of a client's samples in its first epoch."""
    return streams.stream(seed, "batches", round, client).permutation(count)


def one_step(model: nn.Module, x: Tensor, soft: Tensor, lr: float) -> Tensor:
    """Weights after a step of SGD on cross-entropy with soft labels."""
    model.zero_grad()
    loss = -(soft * F.log_softmax(model(x), dim=1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return flat(model) - lr * torch.cat([g.reshape(-1) for g in grads])


# ---- mixup ----


def mixture(batch: Tensor, at: Tensor) -> tuple[float, Tensor]:
    """λ and the partners in a batch of mixed unit vectors; `at` says which sample each row was."""
    own = batch[torch.arange(len(batch)), at]
    rest = batch.clone()
    rest[torch.arange(len(batch)), at] = 0
    partner = torch.where(rest.sum(1) > 0, rest.argmax(1), at)
    moved = partner != at
    if not moved.any():
        return 1.0, at  # Beta(0.1, 0.1) gives a λ of 1, to the last bit, now and then
    weight = own[moved]
    assert torch.allclose(weight, weight[0].expand_as(weight), rtol=1e-12), "one λ a batch"
    assert torch.allclose(rest.sum(1)[moved], 1 - weight[0], rtol=0, atol=1e-12), "convex"
    assert torch.allclose(own[~moved], torch.ones(1).double(), rtol=1e-12), "mixed with itself"
    return float(weight[0]), partner


@pytest.mark.parametrize("gamma", [0.1, 1.0, 3.0])
def test_mixup_shows_convex_sums_with_a_permutation_of_the_batch(gamma: float) -> None:
    go(f"mixup(gamma={gamma})", unit_vectors(12), witness(12), local_steps=20, seed=5)
    assert len(Witness.seen) == 20
    stream = streams.stream(5, "batches", 1, 0)
    drawn = []
    for batch in Witness.seen:
        weight, partner = mixture(batch, stream.permutation(12))
        assert sorted(partner.tolist()) == list(range(12))
        drawn.append((round(weight, 12), tuple(partner.tolist())))
    assert len(set(drawn)) > 15  # drawn anew for every batch (a λ of 1 can repeat when γ is small)


def test_mixup_is_cross_entropy_with_soft_labels() -> None:
    run = go("mixup(gamma=1.0)", unit_vectors(10), witness(10))
    at, y = order(10), F.one_hot(labels(10), CLASSES).double()
    weight, partner = mixture(Witness.seen[0], at)
    assert 0 < weight < 1
    x = weight * torch.eye(10, dtype=torch.float64)[at] + (1 - weight) * torch.eye(10, dtype=torch.float64)[partner]
    expected = one_step(witness(10), x, weight * y[at] + (1 - weight) * y[partner], lr=0.3)
    torch.testing.assert_close(run.server_weights, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "variance"), [(1.0, 1 / 12), (0.2, 1 / 5.6), (4.0, 1 / 36)])
def test_the_weight_of_a_mixture_has_the_beta_laws_mean_and_variance(gamma: float, variance: float) -> None:
    """Var Beta(γ, γ) = 1 / (4 (2γ + 1))."""
    steps = 400
    go(f"mixup(gamma={gamma})", unit_vectors(6), witness(6), local_steps=steps, lr=0.0)
    stream = streams.stream(0, "batches", 1, 0)
    drawn = []
    for batch in Witness.seen:
        at = stream.permutation(6)
        own = batch[torch.arange(6), at]
        drawn.append(float(own.min()))  # of a row that was mixed with itself it is 1
    weights = torch.tensor(drawn)
    assert abs(weights.mean() - 0.5) < 4 * (variance / steps) ** 0.5 + 0.01
    assert abs(weights.var() - variance) < 0.2 * variance


@pytest.mark.parametrize("ascent", ["sam(rho=0.1)", "asam(rho=0.5)", "fedspeed(rho=0.1)", "mofedsam(rho=0.1)"])
@pytest.mark.parametrize("part", ["mixup(gamma=1.0)", "cutmix", "cutout(size=4)"])
def test_both_passes_of_an_ascent_see_the_same_batch(part: str, ascent: str) -> None:
    go(f"{ascent}+{part}", flat_images(8), witness(128), local_steps=3, lr=0.01)
    assert len(Witness.seen) == 6
    for first, second in zip(Witness.seen[::2], Witness.seen[1::2], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(Witness.seen[0], Witness.seen[2])


def test_both_passes_of_an_ascent_have_the_same_weights_of_the_labels() -> None:
    """SAM with mixup is SAM on the mixed batch with its soft labels."""
    run = go("sam(rho=0.2)+mixup(gamma=1.0)", unit_vectors(10), witness(10))
    at, y = order(10), F.one_hot(labels(10), CLASSES).double()
    weight, partner = mixture(Witness.seen[0], at)
    soft, x, model = weight * y[at] + (1 - weight) * y[partner], Witness.seen[0].clone(), witness(10)
    start = flat(model)
    ascent = one_step(model, x, soft, lr=-1.0) - start
    nn.utils.vector_to_parameters(start + 0.2 * ascent / ascent.norm(), model.parameters())
    expected = start + one_step(model, x, soft, lr=0.3) - flat(model)
    torch.testing.assert_close(run.server_weights, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", ["mixup(gamma=0.0)", "mixup(gamma=-1.0)", "cutmix(beta=0.0)"])
@pytest.mark.parametrize("base", ["fedavg", "scaffold+asam"])
def test_without_a_law_to_draw_from_nothing_is_mixed_and_no_bit_changes(part: str, base: str) -> None:
    methods = (base, f"{base}+{part}")
    left, right = (go(m, flat_images(9), witness(128), rounds=2, local_steps=3, lr=0.001) for m in methods)
    assert torch.equal(left.weights, right.weights)


def test_evaluation_sees_the_data_as_they_are() -> None:
    """With lr=0 the loss on the test set is that of the initial model, whatever was mixed in training."""
    for method in ("mixup+cutmix+cutout(size=4)", "fedavg"):
        run = go(method, flat_images(8), witness(128), lr=0.0)
        x, y = flat_images(8).test.batch(torch.arange(8))
        assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(witness(128)(x), y).item(), rel=1e-12)


# ---- cutout ----


def holes(batch: Tensor) -> list[tuple[int, int, int, int]]:
    """Top, bottom, left, right of the zeros in each image, which must be one rectangle through all channels."""
    found = []
    for image in batch:
        zero = image == 0
        assert torch.equal(zero, zero[:1].expand_as(zero)), "the same hole in every channel"
        rows, columns = zero[0].any(1).nonzero().view(-1), zero[0].any(0).nonzero().view(-1)
        assert len(rows), "no hole"
        top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
        assert zero[0, top:bottom, left:right].all() and int(zero[0].sum()) == (bottom - top) * (right - left)
        found.append((top, bottom, left, right))
    return found


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_hole_is_a_square_clipped_at_the_border(size: int) -> None:
    side = 12
    go(f"cutout(size={size})", flat_images(40, side), witness(2 * side * side), local_steps=10, lr=0.0)
    found = [hole for batch in Witness.seen for hole in holes(batch)]
    half = size // 2
    allowed = {(max(0, c - half), min(side, c + half)) for c in range(side)}
    assert {hole[:2] for hole in found} == allowed and {hole[2:] for hole in found} == allowed
    for top, bottom, left, right in found:
        assert (bottom - top) * (right - left) <= size**2
        if min(top, left) > 0 and max(bottom, right) < side:
            assert (bottom - top, right - left) == (size, size)


def test_centres_are_uniform_over_all_pixels_and_each_sample_has_its_own() -> None:
    side, size, count = 8, 4, 60
    go(f"cutout(size={size})", flat_images(count, side), witness(2 * side * side), local_steps=50, lr=0.0)
    batches = torch.stack(Witness.seen)
    assert len(set(holes(batches[0]))) > 30
    empty = (batches[:, :, 0] == 0).double().mean((0, 1))
    reach = torch.tensor([sum(c - size // 2 <= i < c + size // 2 for c in range(side)) for i in range(side)]) / side
    expected = reach[:, None] * reach[None, :]
    spread = (expected * (1 - expected) / (50 * count)).sqrt()
    assert ((empty - expected).abs() < 5 * spread).all()


def test_the_hole_has_the_mean_colour() -> None:
    """Cutout comes after normalisation, so what is cut out is 0 in the model's inputs."""
    x = torch.full((20, 1, 8, 8), 200, dtype=torch.uint8)
    data = Federation([(x, labels(20))], preprocess=Preprocess(mean=(0.5,), std=(0.25,)))
    go("cutout(size=4)", data, witness(64))
    (batch,) = Witness.seen
    assert len(holes(batch)) == 20
    value = (200 / 255 - 0.5) / 0.25
    assert torch.allclose(batch[batch != 0], torch.tensor(value).double(), rtol=1e-6)


def test_cutout_leaves_the_labels_alone() -> None:
    run = go("cutout(size=4)", flat_images(9), witness(128), lr=0.01)
    x, y = Witness.seen[0].clone(), F.one_hot(labels(9), CLASSES).double()[order(9)]
    torch.testing.assert_close(run.server_weights, one_step(witness(128), x, y, 0.01), rtol=1e-12, atol=1e-12)


def test_the_users_data_are_not_cut() -> None:
    federation = flat_images(6)
    before = federation.samples(0).batch(torch.arange(6))[0].clone()
    go("cutout(size=6)+mixup+cutmix", federation, witness(128), local_steps=3, lr=0.0)
    assert torch.equal(federation.samples(0).batch(torch.arange(6))[0], before)


# ---- cutmix ----


def pasted(batch: Tensor, at: Tensor) -> tuple[float, Tensor]:
    """Share of own pixels and the partners in a batch of flat images; the box must be one for all."""
    foreign = (batch != (at + 1.0).view(-1, 1, 1, 1)).all(1)
    moved = foreign.flatten(1).any(1)
    boxes = foreign[moved]
    assert torch.equal(boxes, boxes[:1].expand_as(boxes)), "one box a batch"
    box = boxes[0]
    rows, columns = box.any(1), box.any(0)
    assert torch.equal(box, rows[:, None] & columns[None, :]), "a rectangle"
    assert int(rows.diff().sum()) <= 2 and int(columns.diff().sum()) <= 2, "without gaps"
    partner = at.clone()
    values = batch[moved][:, 0][:, box]
    assert torch.equal(values, values[:, :1].expand_as(values))
    partner[moved] = values[:, 0].long() - 1
    return 1 - int(box.sum()) / box.numel(), partner


def test_cutmix_weighs_the_labels_by_the_pixels() -> None:
    """Over rounds of one step each, λ is the share of own pixels exactly, also where the box was clipped."""
    shares = []
    for seed in range(12):
        run = go("cutmix", flat_images(9, 7), witness(98), lr=0.05, seed=seed)
        at, y, batch = order(9, seed), F.one_hot(labels(9), CLASSES).double(), Witness.seen[0].clone()
        if torch.equal(batch, (at + 1.0).double().view(-1, 1, 1, 1).expand_as(batch)):
            share, partner = 1.0, at
        else:
            share, partner = pasted(batch, at)
        assert sorted(partner.tolist()) == list(range(9))
        expected = one_step(witness(98), batch, share * y[at] + (1 - share) * y[partner], lr=0.05)
        torch.testing.assert_close(run.server_weights, expected, rtol=1e-11, atol=1e-12)
        shares.append(share)
    assert len(set(shares)) > 4
    assert any(0 < share < 1 for share in shares)


def test_boxes_of_cutmix_are_as_large_as_the_uniform_law_says() -> None:
    """Beta(1, 1): P(area > 1/2 of the image before clipping) = 1/2; clipping only makes boxes smaller."""
    steps, side = 300, 16
    go("cutmix(beta=1.0)", flat_images(6, side), witness(2 * side * side), local_steps=steps, lr=0.0)
    stream = streams.stream(0, "batches", 1, 0)
    shares = []
    for batch in Witness.seen:
        at = stream.permutation(6)
        foreign = (batch[:, 0] != (at + 1.0).view(-1, 1, 1)).double().mean((1, 2))
        shares.append(float(foreign.max()))
    assert max(shares) <= 1
    large = sum(share > 0.5 for share in shares) / steps
    assert 0.1 < large < 0.5 + 4 * (0.25 / steps) ** 0.5
    # A box of side s in a unit square about a uniform centre keeps s − s²/4 of its side on the mean.
    side_ratio = torch.linspace(0, 1, 10001).sqrt()
    mean = float(((side_ratio - side_ratio**2 / 4) ** 2).mean())
    assert abs(sum(shares) / steps - mean) < 0.05


def test_clients_and_rounds_draw_apart() -> None:
    x = torch.eye(8, dtype=torch.float64)
    federation = Federation([(x, labels(8)), (x, labels(8))])
    go("mixup", federation, witness(8), rounds=2, lr=0.0)
    drawn = set()
    for batch, (round, client) in zip(Witness.seen, [(1, 0), (1, 1), (2, 0), (2, 1)], strict=True):
        drawn.add(round_off(mixture(batch, order(8, 0, round, client))[0]))
    assert len(drawn) == 4


def round_off(value: float) -> float:
    return round(value, 9)


# ---- refused ----


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("mixup(gamma='big')", "gamma"),
        ("mixup(gamma=1e999)", "gamma"),
        ("cutout(size=-2)", "size"),
        ("cutout(size=2.5)", "size"),
        ("cutmix(beta=1e999)", "beta"),
        ("cutmix(beta='x')", "beta"),
    ],
)
def test_a_value_out_of_range_is_refused_naming_part_and_field(text: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        go(text, flat_images(6), witness(128))
    assert text.split("(")[0] in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("part", ["cutout", "cutmix"])
def test_data_that_are_no_images_are_refused(part: str) -> None:
    with pytest.raises(InputError, match=rf"{part}.*image"):
        go(part, unit_vectors(6), witness(6))


@pytest.mark.parametrize("part", ["mixup", "cutmix"])
def test_a_loss_that_smooths_labels_is_refused_beside_a_part_that_mixes_them(part: str) -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(InputError, match=part) as caught:
        fedflat.run(plain(method=part), federation=flat_images(6), model=witness(128), loss=loss, progress=False)
    assert "smooth" in str(caught.value)


@pytest.mark.parametrize("part", ["mixup", "cutmix"])
def test_a_loss_of_the_users_is_mixed_as_cross_entropy_is(part: str) -> None:
    federation = flat_images(6)
    settings = plain(method=part, lr=0.01)
    own = fedflat.run(
        settings, federation=federation, model=witness(128), loss=lambda z, y: F.cross_entropy(z, y), progress=False
    )
    assert torch.equal(own.weights, fedflat.run(settings, federation=federation, model=witness(128)).weights)
