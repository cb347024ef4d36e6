"""Do two groups of seeds differ significantly? Student's paired t-test and Welch's t-test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

ENOUGH = 3  # smallest number of seeds per group for a test
TINY, PRECISE, STEPS = 1e-300, 1e-15, 10_000


@dataclass(frozen=True)
class TTest:
    """A t-test of equal means."""

    name: str
    statistic: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided p-value: probability of a statistic at least this far from 0 if the means are equal."""
        return two_sided(self.statistic, self.freedom)


def compared(one: Mapping[int, float], other: Mapping[int, float]) -> TTest | None:
    """The suitable test for two groups of values by seed; None if there are too few seeds.

    Runs with the same seed share their partition, initial weights and participants, so common seeds form pairs.
    """
    common = sorted(one.keys() & other.keys())
    if len(common) >= ENOUGH:
        return paired([one[seed] for seed in common], [other[seed] for seed in common])
    return welch(list(one.values()), list(other.values())) if min(len(one), len(other)) >= ENOUGH else None


def paired(one: Sequence[float], other: Sequence[float]) -> TTest:
    """Student's test that the mean of `one` − `other`, pair by pair, is 0."""
    gaps = [a - b for a, b in zip(one, other, strict=True)]
    return TTest("paired t-test", _ratio(fmean(gaps), variance(gaps) / len(gaps)), len(gaps) - 1)


def welch(one: Sequence[float], other: Sequence[float]) -> TTest:
    """Welch's test that two independent groups, whose variances need not be equal, have the same mean."""
    errors = [variance(group) / len(group) for group in (one, other)]
    sizes = [len(one) - 1, len(other) - 1]
    parts = sum(error**2 / size for error, size in zip(errors, sizes, strict=True))
    freedom = sum(errors) ** 2 / parts if parts else float(sum(sizes))
    return TTest("Welch's t-test", _ratio(fmean(one) - fmean(other), sum(errors)), freedom)


def equivalence(one: Mapping[int, float], other: Mapping[int, float], margin: float) -> float:
    """p-value of means that differ by less than `margin`: the larger one of two one-sided tests, as `compared` chooses.

    1 − p is the one-sided p-value of means that differ by more, so a p above 0.95 tells of a difference beyond it.

    >>> near, far = {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.1, 1: 1.1, 2: 1.1}
    >>> equivalence(near, far, 1.0) < 0.05, equivalence(near, far, 0.01) < 0.05
    (True, False)
    """
    found = []
    for side in (1, -1):
        test = compared(one, {seed: value + side * margin for seed, value in other.items()})
        if test is None:
            raise ValueError(f"{ENOUGH} seeds or more are needed, got {sorted(one)} and {sorted(other)}")
        found.append(test.p / 2 if side * test.statistic < 0 else 1 - test.p / 2)
    return max(found)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of several tests, corrected for their number by Holm's step-down method; None is no test.

    The k-th smallest of m is multiplied by m − k + 1.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((p, place) for place, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        adjusted[place] = highest = max(highest, min(1.0, p * (len(order) - rank)))
    return adjusted


def _ratio(gap: float, error: float) -> float:
    """gap / √error; 0 without a gap, infinite without an error."""
    if gap == 0:
        return 0.0
    return gap / math.sqrt(error) if error else math.copysign(math.inf, gap)


def two_sided(statistic: float, freedom: float) -> float:
    """P(|T| ≥ |statistic|) for Student's T with `freedom` degrees of freedom.

    >>> round(two_sided(2.776445, 4), 6)  # the 97.5 % quantile of the tables
    0.05
    """
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic * statistic))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, for a, b > 0 and x from 0 to 1."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly here; the symmetric one is fast
        return 1 - incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) / (a * _fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d₁/(1 + d₂/(1 + …)) of I_x(a, b), by Lentz's method."""
    value, numerator, denominator = 1.0, 1.0, 0.0
    for step in range(1, STEPS):
        d = _coefficient(a, b, x, step)
        denominator = 1 / _away_from_zero(1 + d * denominator)
        numerator = _away_from_zero(1 + d / numerator)
        value *= numerator * denominator
        if abs(numerator * denominator - 1) < PRECISE:
            break
    return value


def _coefficient(a: float, b: float, x: float, step: int) -> float:
    m, odd = divmod(step, 2)
    if odd:
        return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
    return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))


def _away_from_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY
