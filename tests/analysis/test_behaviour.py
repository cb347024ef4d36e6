"""Accuracy by class and round, features, pruning, calibration."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from analysis.worlds import Places, blobs, convnet, flat, images, network, places
from fedflat import InputError, analysis
from fedflat.analysis.calibration import calibration_of


def test_per_class_accuracy_weighs_up_to_the_accuracy() -> None:
    model, (x, y) = network(), blobs(31)
    found = analysis.per_class_accuracy(model, (x, y))
    right = (model(x).argmax(1) == y).double()
    assert found.tolist() == pytest.approx([float(right[y == c].mean()) for c in range(3)])
    absent = analysis.per_class_accuracy(model, (x[y == 1], y[y == 1]))
    assert absent.isnan().tolist() == [True, False, True]


def test_every_place_of_a_sequence_counts_but_those_without_a_label() -> None:
    model, (x, y) = Places(), places(12)
    kept = y != -100
    scores = model(x).detach().transpose(1, 2)[kept]
    right = (scores.argmax(1) == y[kept]).double()
    found = analysis.per_class_accuracy(model, (x, y), batch_size=5)
    assert found.tolist() == pytest.approx([float(right[y[kept] == c].mean()) for c in range(3)])
    whole = analysis.calibration(model, (x, y))
    assert int(whole.counts.sum()) == int(kept.sum())
    assert whole.error == pytest.approx(calibration_of(scores, y[kept]).error, rel=1e-9)


def test_forgetting_is_the_distance_to_the_best_so_far() -> None:
    found = analysis.forgetting([[0.2, 0.5], [0.6, 0.4], [0.5, 0.7]])
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [-0.4, 0.1], [0.1, -0.2]]).double())


def test_rounds_to_target() -> None:
    curve = [0.1, 0.5, 0.3, 0.5, 0.6]
    assert analysis.rounds_to_target(curve, 0.5).round == 2
    assert analysis.rounds_to_target(curve, 0.5, window=2).round == 5
    never = analysis.rounds_to_target(curve, 0.9)
    assert never.round is None and str(never) == "5+" and never.to_dict() == {"round": None, "rounds": 5}


def test_tail_average() -> None:
    assert analysis.tail_average(list(range(1000))) == 949.5
    assert analysis.tail_average([1.0, 2.0]) == 1.5
    with pytest.raises(InputError):
        analysis.tail_average([])


def test_generalisation_gap() -> None:
    model, (x, y), (a, b) = network(), blobs(30), blobs(30, seed=5)
    found = analysis.generalisation(model, (x, y), (a, b))
    assert found.train_loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    assert found.loss_gap == pytest.approx(F.cross_entropy(model(a), b).item() - found.train_loss, rel=1e-9)
    assert analysis.generalisation(model, (x, y), (x, y)).accuracy_gap == 0


def test_features_enter_the_head_and_logits_leave_it() -> None:
    model, (x, y) = convnet(), images(9)
    hidden, labels = analysis.features(model, (x, y), batch_size=4)
    with torch.no_grad():
        expected = model.eval()[:7](x)
        torch.testing.assert_close(hidden, expected)
        length = float(model(x).norm(dim=1).mean())
    assert torch.equal(labels, y)
    assert analysis.feature_norm(model, (x, y)) == pytest.approx(length, rel=1e-12)
    penultimate = analysis.feature_norm(model, (x, y), layer="penultimate")
    assert penultimate == pytest.approx(float(expected.norm(dim=1).mean()), rel=1e-12)


def test_silhouette_by_hand() -> None:
    rows, labels = torch.tensor([[0.0], [1.0], [4.0], [6.0]]), torch.tensor([0, 0, 1, 1])
    by_hand = [(5 - 1) / 5, (4 - 1) / 4, (3.5 - 2) / 3.5, (5.5 - 2) / 5.5]
    assert analysis.silhouette(rows, labels) == pytest.approx(sum(by_hand) / 4, rel=1e-12)
    lonely = analysis.silhouette(rows[:3], labels[:3])
    assert lonely == pytest.approx(((4 - 1) / 4 + (3 - 1) / 3) / 3, rel=1e-12)


def test_nearest_centroid_by_hand() -> None:
    rows, labels = torch.tensor([[0.0], [1.0], [9.0], [10.0], [0.5]]), torch.tensor([0, 0, 1, 1, 1])
    assert analysis.nearest_centroid_accuracy(rows, labels) == 4 / 5
    with pytest.raises(InputError, match="two classes"):
        analysis.nearest_centroid_accuracy(rows, labels * 0)


def test_tsne_keeps_classes_apart_or_says_what_is_missing() -> None:
    x, _ = blobs(30)
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"fedflat\[report\]"):
            analysis.tsne(x)
        return
    found = analysis.tsne(torch.cat([x, x + 100]), perplexity=5)
    assert found.shape == (60, 2)
    assert analysis.nearest_centroid_accuracy(found, torch.arange(60) // 30) == 1.0


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.33, 1.0])
def test_bottom_and_top_complement_each_other(share: float, per_layer: bool) -> None:
    model = convnet()
    bottom = analysis.magnitude_mask(model, share, per_layer=per_layer)
    top = analysis.magnitude_mask(model, 1 - share, which="top", per_layer=per_layer)
    weights = torch.cat([torch.full((p.numel(),), p.dim() > 1) for p in model.parameters()])
    assert torch.equal(bottom ^ top, weights)


def test_pruning_zeroes_the_smallest_in_one_ranking() -> None:
    model = network()
    vector, left = flat(model), flat(analysis.pruned(model, 0.2))
    gone = left == 0
    weights = torch.cat([torch.full((p.numel(),), p.dim() > 1) for p in model.parameters()])
    assert int(gone.sum()) == round(0.2 * int(weights.sum())) and bool(weights[gone].all())
    assert float(vector[gone].abs().max()) <= float(vector[weights & ~gone].abs().min())
    assert torch.equal(left[~gone], vector[~gone])
    assert not isinstance(analysis.pruned(model), type(None)) and torch.equal(flat(model), vector)


def test_calibration_by_hand() -> None:
    """Sure of 0.8 and right half the time, sure of 0.6 and always right."""
    sure = torch.tensor([[0.8, 0.2]] * 4 + [[0.4, 0.6]] * 2).log()
    found = calibration_of(sure, torch.tensor([0, 0, 1, 1, 1, 1]), bins=10)
    assert found.error == pytest.approx((4 * 0.3 + 2 * 0.4) / 6)
    assert found.worst == pytest.approx(0.4)
    assert found.counts.sum() == 6 and math.isnan(float(found.accuracy[0]))


def test_one_bin_is_the_gap_of_the_means() -> None:
    model, (x, y) = network(), blobs(30)
    sure, chosen = model(x).detach().softmax(1).max(1)
    gap = abs(float((chosen == y).double().mean() - sure.mean()))
    found = analysis.calibration(model, (x, y), bins=1)
    assert found.error == pytest.approx(gap, rel=1e-9)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.plot().axes


def test_certain_and_right_is_calibrated() -> None:
    logits = 1e6 * torch.eye(3)
    assert calibration_of(logits, torch.arange(3)).error == 0


def test_a_model_without_linear_layers_has_logits() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()).double()
    assert analysis.features(model, images(4), layer="logits")[0].shape == (4, 3)
