"""How much privacy noise buys: Rényi differential privacy of sums with Gaussian noise, and the (ε, δ) that follows.

`noise` is the standard deviation of the noise over the largest norm of one client's term. Two federations are
neighbours if they differ in one client only, whose term is zero in one of them; the clients' names and their sampling
are the same in both. Where a client is exchanged for another the terms differ by up to twice that norm: halve `noise`.

Each function gives the divergence of one round at every order of `ORDERS`; those of several rounds add up.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ORDERS = np.array([*range(2, 128), *(2**k for k in range(7, 13))], dtype=np.float64)
_LOG_FACTORIAL = np.concatenate([[0.0], np.log(np.arange(1, ORDERS[-1] + 1)).cumsum()])


def gaussian(noise: float) -> Array:
    """Everybody takes part, or nothing is known of who does: α / 2σ²."""
    return ORDERS / (2 * noise**2)


@cache
def poisson(noise: float, rate: float) -> Array:
    """Each client joins on its own with probability `rate` (Mironov, Talwar & Zhang, 2019, §3.3: exact).

    (1/(α−1)) log Σ_k C(α,k) (1−q)^(α−k) q^k exp(k(k−1)/2σ²)
    """
    return gaussian(noise) if rate == 1 else np.array([_log_moment(noise, rate, int(a)) / (a - 1) for a in ORDERS])


@cache
def bernoulli(noise: float, rate: float, clients: int) -> Array:
    """As `poisson`, but the draw is repeated while nobody has joined, as the participation of this name does.

    Given the others who joined, a client joined with probability q, or for certain where there is no other one. So the
    moments mix: (1−π) A_q + π A_1, π = q(1−q)^(N−1) / (1−(1−q)^N) the probability that it is alone.
    """
    if rate == 1:
        return gaussian(noise)
    nobody = clients * math.log1p(-rate)
    alone = math.log(rate) + nobody - math.log1p(-rate) - math.log(-math.expm1(nobody))
    others = math.log(-math.expm1(alone)) if alone < 0 else -math.inf
    with_others, on_its_own = (ORDERS - 1) * poisson(noise, rate), (ORDERS - 1) * gaussian(noise)
    return np.logaddexp(others + with_others, alone + on_its_own) / (ORDERS - 1)


@cache
def fixed_size(noise: float, rate: float) -> Array:
    """A share `rate` of the clients, all sets of that size equally likely (Wang, Balle & Kasiviswanathan, 2019, Thm 9).

    The theorem is about exchanged clients, which our neighbours are, and so counts half the noise. Where it gives more
    than no sampling at all does, that is taken.
    """
    if rate == 1:
        return gaussian(noise)
    return np.minimum(gaussian(noise), [_log_bound(noise / 2, rate, int(a)) / (a - 1) for a in ORDERS])


def epsilon(divergence: Array, delta: float) -> float:
    """The least ε at this δ (Canonne, Kamath & Steinke, 2020, Prop. 12).

    >>> round(epsilon(10 * gaussian(5.0), delta=1e-5), 2)
    2.81
    """
    bound = divergence + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(bound.min()))


def _log_moment(noise: float, rate: float, order: int) -> float:
    k = np.arange(order + 1)
    terms = _log_choose(order, k) + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
    return max(0.0, float(np.logaddexp.reduce(terms)))


def _log_bound(noise: float, rate: float, order: int) -> float:
    k = np.arange(2, order + 1)
    terms = math.log(2) + k * (k - 1) / (2 * noise**2)
    terms[0] = min(terms[0], math.log(4) + math.log(-math.expm1(-1 / noise**2)) + 1 / noise**2)
    return float(np.logaddexp.reduce([0.0, *(terms + _log_choose(order, k) + k * math.log(rate))]))


def _log_choose(order: int, k: NDArray[np.int64]) -> Array:
    return np.asarray(_LOG_FACTORIAL[order] - _LOG_FACTORIAL[k] - _LOG_FACTORIAL[order - k])
