"""Metrics equal scikit-learn's, whatever the batches that their sums come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from fedflat.errors import InputError, UnknownNameError
from fedflat.tasks import METRICS, Metric, metrics_of


def measured(metric: Metric, output: Tensor, y: Tensor, cuts: int = 3) -> Any:
    """The metric from sums over batches of different sizes."""
    pieces = zip(torch.tensor_split(output, cuts), torch.tensor_split(y, cuts), strict=True)
    return metric.value(sum(metric.count(*piece).numpy() for piece in pieces))  # type: ignore[arg-type]


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SCORES, LABELS = draws(200, 7), torch.randint(6, (200,), generator=torch.Generator().manual_seed(1))  # class 6 never is
FOUND = SCORES.argmax(1).numpy()
NUMBERS, TRUE = draws(50, 2), draws(50, 2, seed=3) + 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", sk.accuracy_score(LABELS, FOUND)),
        ("top5", sk.top_k_accuracy_score(LABELS, SCORES, k=5, labels=range(7))),
        ("macro_f1", sk.f1_score(LABELS, FOUND, average="macro")),
        ("miou", np.mean(sk.jaccard_score(LABELS, FOUND, average=None, labels=range(6)))),
        ("perplexity", np.exp(sk.log_loss(LABELS, SCORES.double().softmax(1), labels=range(7)))),
    ],
)
@pytest.mark.parametrize("cuts", [1, 4])
def test_metrics_of_classes(name: str, expected: Any, cuts: int) -> None:
    assert measured(METRICS[name], SCORES, LABELS, cuts) == pytest.approx(expected, rel=1e-9)


def test_the_intersection_over_union_of_a_class_that_does_not_occur_does_not_exist() -> None:
    *found, last = measured(METRICS["iou"], SCORES, LABELS)
    assert last is None and found == pytest.approx(sk.jaccard_score(LABELS, FOUND, average=None, labels=range(6)))


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
def test_balanced_accuracy_is_the_mean_recall_of_the_classes_that_occur() -> None:
    expected = sk.balanced_accuracy_score(LABELS, FOUND)
    assert measured(METRICS["balanced_accuracy"], SCORES, LABELS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rmse", sk.root_mean_squared_error(TRUE.reshape(-1), NUMBERS.reshape(-1))),
        ("mae", sk.mean_absolute_error(TRUE.reshape(-1), NUMBERS.reshape(-1))),
        ("r2", sk.r2_score(TRUE.reshape(-1), NUMBERS.reshape(-1))),
    ],
)
def test_metrics_of_numbers(name: str, expected: float) -> None:
    assert measured(METRICS[name], NUMBERS, TRUE) == pytest.approx(expected, rel=1e-6)


def test_the_area_under_the_curve_is_exact_up_to_ties_within_a_bin() -> None:
    scores, truth = draws(2000, 3), (draws(2000, 3, seed=5) > 0).float()
    scores += truth  # so that there is something to tell
    expected = sk.roc_auc_score(truth, scores, average="macro")
    assert measured(METRICS["auc"], scores, truth) == pytest.approx(expected, abs=2e-4)
    coarse = (scores[:, :1] > 0.5).float() * 4 - 2  # two values only: ties count one half
    assert measured(METRICS["auc"], coarse, truth[:, :1]) == pytest.approx(sk.roc_auc_score(truth[:, :1], coarse))
    two, labels = draws(500, 2), torch.arange(500) % 2
    expected = sk.roc_auc_score(labels, two.softmax(1)[:, 1])
    assert measured(METRICS["auc"], two, labels) == pytest.approx(expected, abs=5e-4)


def test_calibration_of_a_model_that_is_right_as_often_as_it_says() -> None:
    chance = torch.tensor([0.8, 0.2])
    output = chance.log().expand(10, 2)
    right = torch.tensor([0] * 8 + [1] * 2)
    assert measured(METRICS["ece"], output, right) == pytest.approx(0.0, abs=1e-6)
    assert measured(METRICS["ece"], output, torch.ones(10, dtype=torch.int64)) == pytest.approx(0.8, abs=1e-6)


def test_ignored_pixels_do_not_count() -> None:
    output, y = draws(2, 3, 4, 5), torch.randint(3, (2, 4, 5), generator=torch.Generator().manual_seed(2))
    y[0] = -100
    for name in ("accuracy", "miou", "perplexity", "ece", "macro_f1"):
        assert measured(METRICS[name], output, y, 1) == measured(METRICS[name], output[1:], y[1:], 1)


def test_a_perfect_prediction_has_an_intersection_over_union_of_one() -> None:
    y = torch.tensor([[[0, 1], [2, -100]]])
    output = torch.nn.functional.one_hot(y.clamp(min=0), 4).movedim(-1, 1).float()
    assert measured(METRICS["miou"], output, y, 1) == 1.0  # class 3 does not occur


def test_several_labels_at_once() -> None:
    output, truth = draws(80, 4), (draws(80, 4, seed=9) > 0).float()
    found = (output > 0).numpy()
    assert measured(METRICS["macro_f1"], output, truth) == pytest.approx(sk.f1_score(truth, found, average="macro"))
    assert measured(METRICS["accuracy"], output, truth) == pytest.approx((found == truth.numpy()).mean())


def test_your_own_function_is_a_mean_over_samples() -> None:
    (metric,) = metrics_of({"bias": lambda output, y: (output - y).mean()})
    assert measured(metric, NUMBERS, TRUE, 7) == pytest.approx((NUMBERS - TRUE).mean().item(), rel=1e-5)


def test_of_your_own_function_less_is_better_where_its_name_or_you_say_so() -> None:
    def square(output: Any, y: Any) -> Any:
        return (output - y).square().mean()

    told = {"mse": square, "gain": square, "cost": (square, "min"), "my_loss": (square, "max")}
    assert {metric.name: metric.falls for metric in metrics_of(told)} == {
        "mse": True,
        "gain": False,
        "cost": True,
        "my_loss": False,
    }
    with pytest.raises(InputError, match=r"metric 'cost' takes \(function, \"min\"\)"):
        metrics_of({"cost": (square, "less")})


def test_what_cannot_be_a_metric_is_told() -> None:
    with pytest.raises(UnknownNameError, match="accuracy"):
        metrics_of("acuracy")
    with pytest.raises(InputError, match="names, Metric objects"):
        metrics_of([3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="batch, classes"):
        METRICS["accuracy"].count(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="targets' shape"):
        METRICS["rmse"].count(torch.zeros(3, 2), torch.zeros(3))


def test_objects_of_torchmetrics_whose_states_are_added() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    (metric,) = metrics_of({"kappa": torchmetrics.classification.MulticlassCohenKappa(7)})
    assert measured(metric, SCORES, LABELS, 5) == pytest.approx(sk.cohen_kappa_score(LABELS, FOUND), rel=1e-5)
    with pytest.raises(InputError, match="cannot add"):
        metrics_of({"auc": torchmetrics.classification.BinaryAUROC()})
