"""Landscapes: the centre is the plain evaluation, directions are what they say, models lie where they belong."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.worlds import Places, blobs, convnet, draws, first, flat, images, network, places, quadratic
from fedflat import FlatModel, InputError, analysis
from fedflat.analysis.directions import filter_normalised, gaussian
from fedflat.analysis.noise import noise_direction


def moved(model: nn.Module, seed: int, length: float = 0.5) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p += length * torch.randn(p.shape, generator=draws(seed), dtype=p.dtype)
    return model


def plain_scores(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    with torch.no_grad():
        output = model.eval()(data[0])
    return F.cross_entropy(output, data[1]).item(), (output.argmax(1) != data[1]).double().mean().item()


@pytest.mark.parametrize("direction", ["filter", "eigen"])
def test_centre_is_the_plain_evaluation(direction: str) -> None:
    data = blobs(20)
    expected = plain_scores(network(), data)
    line = analysis.landscape_1d(network(), data, direction=direction, points=5)
    area = analysis.landscape_2d(network(), data, direction=direction, points=3, radius=0.5)
    assert (float(line.loss[2]), float(line.error[2])) == pytest.approx(expected, rel=1e-12)
    assert (float(area.loss[1, 1]), float(area.error[1, 1])) == pytest.approx(expected, rel=1e-12)
    assert line.axes[0].tolist() == [-1, -0.5, 0, 0.5, 1] and area.loss.shape == (3, 3)


def test_points_do_not_depend_on_workers() -> None:
    data, test = images(20, torch.float32), images(8, torch.float32, seed=2)
    one, two, three = (
        analysis.landscape_2d(convnet(torch.float32), data, test=test, points=4, workers=w) for w in (1, 2, 3)
    )
    for name in ("loss", "error", "test_loss", "test_error"):
        assert torch.equal(getattr(one, name), getattr(two, name)) and torch.equal(
            getattr(one, name), getattr(three, name)
        )


def test_quadratic_along_a_vector() -> None:
    model, data, matrix = quadratic([3.0, 1.0, -1.0])
    v = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    found = analysis.landscape_1d(model, data, direction=v, points=7, radius=2.0, loss=first)
    places = flat(model) + found.axes[0][:, None] * v
    torch.testing.assert_close(found.loss, 0.5 * torch.einsum("pi,ij,pj->p", places, matrix, places))
    assert bool(found.error.isnan().all())


def test_filters_have_the_lengths_of_the_models() -> None:
    model = FlatModel(convnet(), torch.float64)
    direction = filter_normalised(model, gaussian(model, 0, 0))
    for span in model.spans:
        rows, own = span.channels(direction).norm(dim=1), span.channels(model.theta).norm(dim=1)
        torch.testing.assert_close(rows, own if len(span.shape) > 1 else torch.zeros_like(own), rtol=1e-9, atol=0)


def test_eigenvectors_show_their_eigenvalue() -> None:
    """L(w + a v₁) − L(w) ≈ a gᵀv₁ + ½ a² λ₁."""
    model, (x, y) = network(), blobs(20)
    top = analysis.curvature(model, (x, y), k=1, trace=False, tol=1e-10)
    F.cross_entropy(model(x), y).backward()
    slope = float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]) @ top.vectors[0])
    a = 1e-3
    line = analysis.landscape_1d(model, (x, y), direction=top.vectors[0], points=3, radius=a)
    assert float(line.loss[2] - line.loss[0]) / (2 * a) == pytest.approx(slope, rel=1e-4)
    bend = float(line.loss[2] - 2 * line.loss[1] + line.loss[0]) / a**2
    assert bend == pytest.approx(float(top.eigenvalues[0]), rel=1e-4)
    eigen = analysis.landscape_1d(model, (x, y), direction="eigen", points=3, radius=a)
    again = float(eigen.loss[2] - 2 * eigen.loss[1] + eigen.loss[0]) / a**2
    assert again == pytest.approx(bend, rel=1e-4)


def test_plane_goes_through_the_three_models() -> None:
    data, models = blobs(20), [network(), moved(network(), 1), moved(network(), 2)]
    vectors = [flat(model) for model in models]
    found = analysis.landscape_plane(*models, data, points=8, margin=0.2, test=blobs(9, seed=3))
    (zero, second, third) = (torch.tensor(found.marks[f"model {i}"], dtype=torch.float64) for i in (1, 2, 3))
    assert zero.tolist() == [0, 0] and second[1] == 0
    assert float(second.norm()) == pytest.approx(float((vectors[1] - vectors[0]).norm()), rel=1e-12)
    assert float(third.norm()) == pytest.approx(float((vectors[2] - vectors[0]).norm()), rel=1e-12)
    # with 8 points over [−0.2, 1.2] the second falls on 0 and the seventh on 1, up to rounding
    assert float(found.loss[1, 1]) == pytest.approx(plain_scores(models[0], data)[0], rel=1e-9)
    assert float(found.loss[6, 1]) == pytest.approx(plain_scores(models[1], data)[0], rel=1e-9)
    assert found.test_loss is not None and found.test_loss.shape == (8, 8)
    # the third model: along u by ⟨θ₃ − θ₁, û⟩, and the whole of v
    assert float(found.axes[1][6]) == pytest.approx(float(third[1]), rel=1e-9)


def test_weights_rounded_onto_a_line_span_no_plane() -> None:
    """The mean of two models in single precision leaves their line by rounding alone, however near they are."""
    model = convnet(torch.float32)
    near = [moved(convnet(torch.float32), seed, 1e-4) for seed in (1, 2)]
    mean = (flat(model) + flat(near[0])) / 2
    with pytest.raises(InputError, match="one line"):
        analysis.landscape_plane(model, near[0], mean, images(6, torch.float32), points=2)
    found = analysis.landscape_plane(model, *near, images(6, torch.float32), points=2)
    assert found.marks["model 3"][1] > 1e-4


def test_plane_computes_batch_statistics_anew() -> None:
    """At a model itself, refreshed statistics of the whole data in one batch are those of that batch."""
    data, models = images(12), [convnet(), moved(convnet(), 1), moved(convnet(), 2)]
    fresh = analysis.landscape_plane(*models, data, points=8, batch_size=12)
    reference = convnet()
    norm = reference[1]
    norm.reset_running_stats()
    norm.momentum = None
    reference.eval()
    norm.train()
    reference(data[0])
    assert float(fresh.loss[1, 1]) == pytest.approx(plain_scores(reference, data)[0], rel=1e-9)
    fixed = analysis.landscape_plane(*models, data, points=8, refresh_bn=False)
    assert float(fixed.loss[1, 1]) == pytest.approx(plain_scores(convnet(), data)[0], rel=1e-9)


def test_line_between_two_models() -> None:
    data, a, b = blobs(20), network(), moved(network(), 1)
    found = analysis.interpolate(a, b, data, points=3)
    middle = network()
    nn.utils.vector_to_parameters((flat(a) + flat(b)) / 2, middle.parameters())
    expected = [plain_scores(model, data)[0] for model in (a, middle, b)]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(found.loss, analysis.interpolate(a, flat(b), data, points=3).loss)


def test_barriers_between_several_models() -> None:
    data, models = blobs(20), [network(), moved(network(), 1), moved(network(), 2)]
    found = analysis.connectivity(models, data, points=5)
    assert found.loss.diag().tolist() == pytest.approx([plain_scores(model, data)[0] for model in models], rel=1e-12)
    line = analysis.interpolate(models[0], models[2], data, points=5)
    straight = torch.lerp(line.loss[0], line.loss[-1], line.axes[0])
    assert float(found.barrier[0, 2]) == pytest.approx(max(0.0, float((line.loss - straight).max())), abs=1e-12)
    assert torch.equal(found.barrier, found.barrier.T) and float(found.barrier.diag().abs().sum()) == 0
    convex = nn.Linear(4, 3).double()
    assert float(analysis.connectivity([convex, moved(nn.Linear(4, 3).double(), 1)], data).barrier.max()) < 1e-15


def test_noise_has_the_length_asked_for() -> None:
    model = FlatModel(network(), torch.float64)
    whole, layers = noise_direction(model, 0, 3), noise_direction(model, 0, 3, per_layer=True)
    assert float(whole.norm()) == pytest.approx(float(model.theta.norm()), rel=1e-12)
    for span in model.spans:
        assert float(span.of(layers).norm()) == pytest.approx(float(span.of(model.theta).norm()), rel=1e-12)


def test_noise_curve_of_a_sphere() -> None:
    """½‖w + ε‖² at r = ‖ε‖/‖w‖: at 0 the plain loss without deviation; the mean over ±ε is ½‖w‖²(1 + r²)."""
    model, data, _ = quadratic([1.0] * 400)
    found = analysis.noise_curve(model, data, loss=first, ratios=(0.0, 0.5, 1.0), draws=40)
    half = 0.5 * float(flat(model).square().sum())
    assert float(found.loss[0]) == pytest.approx(half, rel=1e-12) and float(found.loss_deviation[0]) < 1e-12 * half
    for place, r in ((1, 0.5), (2, 1.0)):
        error = float(found.loss_deviation[place]) / 40**0.5
        assert abs(float(found.loss[place]) - half * (1 + r * r)) < 4 * error
        assert float(found.loss_deviation[place]) == pytest.approx(2 * half * r / 20, rel=0.4)  # ‖w‖² r / √d


def test_labels_to_be_ignored_are_no_errors() -> None:
    model, (x, y) = Places(), places(12)
    kept = y != -100
    expected = float((model(x).argmax(1) != y)[kept].double().mean())
    line = analysis.landscape_1d(model, (x, y), points=3, batch_size=5)
    assert float(line.error[1]) == pytest.approx(expected, rel=1e-12)
    assert float(line.loss[1]) == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)


def test_landscapes_can_be_told_and_drawn() -> None:
    data = blobs(9)
    line = analysis.landscape_1d(network(), data, points=3)
    area = analysis.landscape_2d(network(), data, points=3, test=data)
    noise = analysis.noise_curve(network(), data, draws=2)
    pairs = analysis.connectivity([network(), network()], data, points=2)
    for result in (line, area, noise, pairs):
        json.dumps(result.to_dict(), allow_nan=False)
        assert result.plot().axes
