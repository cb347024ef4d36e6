"""The privacy of noisy sums: Rényi differential privacy of the Gaussian mechanism, and the (ε, δ) that follows.

`noise` is the standard deviation of the noise divided by the largest norm of one client's term. Two federations are
neighbours if they differ in one client only, whose term is zero in one of them; the clients' names and their sampling
are the same in both. If a client is exchanged for another, the terms differ by up to twice that norm: halve `noise`.

Each function gives the divergence of one round at every order of `ORDERS`; the divergences of several rounds add up.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedflat.extras import needed

Array = NDArray[np.float64]
_FRACTIONS = [*(k / 10 for k in range(11, 20)), *(k / 4 for k in range(8, 48) if k % 4)]
ORDERS = np.array(sorted([*_FRACTIONS, *range(2, 128), *(2**k for k in range(7, 13))]), dtype=np.float64)
_LOG_FACTORIAL = np.concatenate([[0.0], np.log(np.arange(1, ORDERS[-1] + 1)).cumsum()])
_POINTS = 8000  # of a numerical integral


def gaussian(noise: float) -> Array:
    """Every client takes part, or nothing is known about the sampling: α / 2σ²."""
    return ORDERS / (2 * noise**2)


@cache
def poisson(noise: float, rate: float) -> Array:
    """Each client joins independently with probability `rate` (Mironov, Talwar & Zhang, 2019, §3.3: exact).

    (1/(α−1)) log Σ_k C(α,k) (1−q)^(α−k) q^k exp(k(k−1)/2σ²) for whole orders; for others the integral that this is.
    """
    if rate == 1:
        return gaussian(noise)
    moment = (_log_moment(noise, rate, int(a)) if a == int(a) else _log_integral(noise, rate, a) for a in ORDERS)
    return np.fromiter(moment, np.float64) / (ORDERS - 1)


@cache
def bernoulli(noise: float, rate: float, clients: int) -> Array:
    """As `poisson`, but the draw is repeated while no client has joined, as with participation="bernoulli(q)".

    Given which others joined, a client joined with probability q, or with certainty if there are no others. So the
    moments mix: (1−π) A_q + π A_1, where π = q(1−q)^(N−1) / (1−(1−q)^N) is the probability that it is alone.
    """
    if rate == 1:
        return gaussian(noise)
    alone = _log_alone(rate, clients)
    others = math.log(-math.expm1(alone)) if alone < 0 else -math.inf
    with_others, on_its_own = (ORDERS - 1) * poisson(noise, rate), (ORDERS - 1) * gaussian(noise)
    return np.logaddexp(others + with_others, alone + on_its_own) / (ORDERS - 1)


def alone(rate: float, clients: int) -> float:
    """π, the probability that a client is the only one that joins, given that somebody does; see `bernoulli`."""
    return 0.0 if rate == 1 else math.exp(_log_alone(rate, clients))


def _log_alone(rate: float, clients: int) -> float:
    nobody = clients * math.log1p(-rate)
    return math.log(rate) + nobody - math.log1p(-rate) - math.log(-math.expm1(nobody))


@cache
def fixed_size(noise: float, rate: float) -> Array:
    """A fraction `rate` of the clients, all sets of that size equally likely.

    Who is drawn takes the place of somebody else, j. Given the rest of the set and j, the sum is (1−q) A + q B in one
    federation and (1−q) A + q B' in the other: Gaussians at the terms of j, of the client, and at zero. Joint convexity
    (Balle, Barthe & Gaboardi, 2018, Thm 2) bounds the hockey-stick divergence at γ = 1 + q(e^ε − 1),

        E_γ ≤ q min((1−β) δ_2(ε) + β δ_1(ε), δ_1(log γ)),  β = γ e^−ε,

    by that of two Gaussians at distance 2 and 1, since A may be opposite to B; in the other direction by q δ_1(ε). The
    Rényi divergence is an integral of both (Sason & Verdú, 2016). No bound for these neighbours can come near that of
    `poisson`: with all others opposite to the client, (1−q) A + q B against (1−q) A + q B' is what happens.

    Where Theorem 9 of Wang, Balle & Kasiviswanathan (2019) at half the noise, or no sampling, gives less, it is taken.
    """
    if rate == 1:
        return gaussian(noise)
    known = [_log_bound(noise / 2, rate, int(a)) / (a - 1) if a == int(a) else math.inf for a in ORDERS]
    return np.minimum(np.minimum(gaussian(noise), known), _replaced(noise, rate))


def epsilon(divergence: Array, delta: float) -> float:
    """The least ε at this δ (Canonne, Kamath & Steinke, 2020, Prop. 12).

    >>> round(epsilon(10 * gaussian(5.0), delta=1e-5), 2)
    2.81
    """
    bound = divergence + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(bound.min()))


def prv_epsilon(noise: float, rate: float, rounds: int, delta: float) -> float:
    """The ε of Poisson sampling by numerical composition (PRV: Gopi et al., 2021), with opacus of the extra `dp`."""
    prv = needed("opacus.accountants", "opacus, which has the PRV accountant,", "dp").PRVAccountant()
    prv.history = [(noise, rate, rounds)]
    return float(prv.get_epsilon(delta))


def _log_integral(noise: float, rate: float, order: float) -> float:
    """log of the mean of (1 − q + q exp((2x − 1)/2σ²))^α over x ~ N(0, σ²), by the trapezoidal rule."""
    x = np.linspace(-14 * noise, order + 14 * noise, _POINTS)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    return max(0.0, _log_area(order * ratio - x**2 / (2 * noise**2), x) - math.log(noise * math.sqrt(2 * math.pi)))


def _replaced(noise: float, rate: float) -> Array:
    """See `fixed_size`: (1/(α−1)) log(1 + α(α−1) ∫ (γ^(α−2) E_γ(P‖Q) + γ^(−α−1) E_γ(Q‖P)) dγ), over ε."""
    found = []
    for order in ORDERS:
        top = min(700.0, 120 / noise + 4 * (order + 2) / noise**2 + 5)
        eps = np.linspace(0, 1, _POINTS) ** 2 * top
        gamma = np.log1p(rate * np.expm1(eps))
        near, far, direct = (_log_delta(e, d / noise) for e, d in ((eps, 1.0), (eps, 2.0), (gamma, 1.0)))
        apart = np.log(-np.expm1(np.minimum(gamma - eps, -1e-300)))
        there = np.minimum(np.logaddexp(gamma - eps + near, apart + far), direct)
        both = np.logaddexp((order - 2) * gamma + there, (-order - 1) * gamma + near) + 2 * math.log(rate) + eps
        whole = top < 700  # else the integral is cut off, and the order of no use
        found.append(np.logaddexp(0, math.log(order * (order - 1)) + _log_area(both, eps)) if whole else math.inf)
    return np.array(found) / (ORDERS - 1)


def _log_delta(epsilon: Array, mu: float) -> Array:
    """log of the hockey-stick divergence at e^ε of two Gaussians at distance μ, in standard deviations."""
    tails = (torch.special.log_ndtr(torch.from_numpy(-epsilon / mu + s * mu / 2)).numpy() for s in (1, -1))
    above, below = tails
    return np.asarray(above + np.log(-np.expm1(np.minimum(epsilon + below - above, -1e-300))))


def _log_area(logs: Array, x: Array) -> float:
    """log of the integral of exp(logs), by the trapezoidal rule."""
    most = float(logs.max())
    heights = np.exp(logs - most)
    return most + math.log(float(np.sum((heights[1:] + heights[:-1]) / 2 * np.diff(x))))


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
