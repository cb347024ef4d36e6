"""The distribution of the clients' accuracies, against a few lines on a sorted list."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat import InputError
from fedflat.core.fairness import Fairness

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=130)


def tail(count: int) -> int:
    """ceil of a twentieth, in whole numbers, at least one."""
    return max(1, -(-count // 20))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=accuracies)
def test_every_number_is_that_of_the_definition(values: list[float]) -> None:
    found, low, m = Fairness.of(values), sorted(values), tail(len(values))
    expected = {
        "mean": math.fsum(values) / len(values),
        "low5": math.fsum(low[:m]) / m,
        "top5": math.fsum(low[-m:]) / m,
        "std": statistics.pstdev(values),
        "variance": statistics.pvariance(values),
        "min": low[0],
        "max": low[-1],
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-9), name
    assert found.min - 1e-12 <= found.low5 <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.top5 <= found.max + 1e-12


@settings(max_examples=30, deadline=None, derandomize=True)
@given(values=accuracies, shuffle=st.randoms(use_true_random=False))
def test_the_order_of_the_clients_does_not_matter(values: list[float], shuffle: random.Random) -> None:
    other = list(values)
    shuffle.shuffle(other)
    assert Fairness.of(values).to_dict() == Fairness.of(other).to_dict()


@pytest.mark.parametrize(
    ("count", "m"), [(1, 1), (5, 1), (20, 1), (21, 2), (40, 2), (60, 3), (100, 5), (101, 6), (140, 7)]
)
def test_a_twentieth_of_the_clients_is_rounded_up(count: int, m: int) -> None:
    """Five of 100, one of 20."""
    found = Fairness.of([i / count for i in range(count)])
    assert found.low5 == pytest.approx(sum(range(m)) / m / count)
    assert found.top5 == pytest.approx(sum(range(count - m, count)) / m / count)


def test_equal_clients_have_no_spread() -> None:
    found = Fairness.of([0.7] * 30)
    numbers = (found.mean, found.low5, found.top5, found.min, found.max, found.quantile(0.5))
    assert numbers == pytest.approx([0.7] * 6, abs=1e-15)
    assert found.std == pytest.approx(0.0, abs=1e-12) and found.variance == pytest.approx(0.0, abs=1e-12)


def test_one_client_is_its_own_best_and_worst() -> None:
    found = Fairness.of([0.3])
    assert set(found.summary().values()) == {0.3, 0.0}


def test_quantiles_histogram_and_share_below() -> None:
    found = Fairness.of([0.9, 0.1, 0.5, 0.5, 1.0, 0.0, 0.25, 0.75])
    assert found.quantile(0.0) == 0.0 and found.quantile(1.0) == 1.0 and found.quantile(0.5) == 0.5
    assert found.share_below(0.5) == 3 / 8  # 0.5 itself is not below
    assert found.share_below(0.0) == 0.0 and found.share_below(1.1) == 1.0
    assert found.histogram(bins=4) == [2, 1, 2, 3]  # [0, ¼), [¼, ½), [½, ¾), [¾, 1]
    assert sum(found.histogram()) == 8


def test_the_table_of_the_paper_has_lowest_and_top() -> None:
    assert list(Fairness.of([0.5]).summary()) == ["mean", "std", "min", "max", "low5", "top5"]


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [math.inf]])
def test_nothing_and_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(InputError, match="accurac"):
        Fairness.of(values)
