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

    Who is drawn takes the place of somebody else, j. Given the rest of the set and j, the sum is P = (1−q) N_a + q N_b
    in one federation and Q = (1−q) N_a + q N_0 in the other: Gaussians at the terms of j and of the client, a and b,
    whose norms are 1 at most, and at zero. At γ = 1 + q(e^ε − 1) the hockey-stick divergence is (Balle, Barthe &
    Gaboardi, 2018, Thm 2)

        E_γ(P‖Q) = q sup_T (N_b(T) − e^ε (1−β) N_a(T) − e^ε β N_0(T)),  β = γ e^−ε.

    Of all T with the same N_0(T), a half-line has the most of N_b and the least of N_a at once if b = 1 and a = −1
    (Neyman & Pearson): so this is the worst case at every γ ≥ 1. In the other direction it is a = b, for the same
    reason. Joint convexity carries both over to random sets and j. The Rényi divergence is an integral of E_γ in both
    directions (Sason & Verdú, 2016), and only a little more than that of the worst case. With all others opposite to
    the client that case happens, so no bound for these neighbours can come near that of `poisson`.
    """
    if rate == 1:
        return gaussian(noise)
    moments = [np.logaddexp(_opposite(noise, rate, order), _alike(noise, rate, order)) for order in ORDERS]
    return np.minimum(gaussian(noise), np.logaddexp(0, moments) / (ORDERS - 1))


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


def _opposite(noise: float, rate: float, order: float) -> float:
    """log of α(α−1) ∫ γ^(α−2) E_γ(P‖Q) dγ over γ ≥ 1, for centres −1 and 1 against −1 and 0; see `fixed_size`.

    That is ∫ (r^α − 1 − α(r − 1)) dQ over r = dP/dQ ≥ 1, and r grows with x.
    """
    high = 2 * order + 2 + 14 * noise
    x = np.linspace(0.5, high, int(min(400_000, max(_POINTS, 16 * high / min(noise, noise**2)))))
    stay, go, scale = math.log1p(-rate), math.log(rate), 2 * noise**2
    other = stay - (x + 1) ** 2 / scale
    here, there = (np.logaddexp(other, go - (x - centre) ** 2 / scale) for centre in (1, 0))
    area = _log_area(_log_bend(order, np.maximum(here - there, 0)) + there, x)
    return area - math.log(noise * math.sqrt(2 * math.pi))


def _alike(noise: float, rate: float, order: float) -> float:
    """log of α(α−1) ∫ γ^(−α−1) E_γ(Q‖P) dγ over γ ≥ 1, for centres 1 and 0 against 1; see `fixed_size`.

    That is ∫ (s^(1−α) − 1 − (1−α)(s − 1)) dP over s = dQ/dP ≥ 1.
    """
    x = np.linspace(-1 - 14 * noise, 0.5, _POINTS)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (1 - 2 * x) / (2 * noise**2))
    area = _log_area(_log_bend(1 - order, np.maximum(ratio, 0)) - (x - 1) ** 2 / (2 * noise**2), x)
    return area - math.log(noise * math.sqrt(2 * math.pi))


def _log_bend(power: float, u: Array) -> Array:
    """log of r^p − 1 − p(r − 1) at r = e^u, or a little more where differences would cancel or overflow."""
    near = math.log((power**2 + abs(power)) / 2) + 2 * np.log(np.maximum(u, 1e-150)) + max(power, 1.0) * u
    far = power * u if power > 0 else math.log(-power) + u
    with np.errstate(all="ignore"):
        between = np.log(np.expm1(np.minimum(power * u, 600)) - power * np.expm1(np.minimum(u, 600)))
    return np.asarray(np.where(u < 1e-5, near, np.where(max(power, 1.0) * u > 40, far, between)))


def _log_area(logs: Array, x: Array) -> float:
    """log of the integral of exp(logs), by the trapezoidal rule."""
    most = float(logs.max())
    heights = np.exp(logs - most)
    return most + math.log(float(np.sum((heights[1:] + heights[:-1]) / 2 * np.diff(x))))


def _log_moment(noise: float, rate: float, order: int) -> float:
    k = np.arange(order + 1)
    terms = _log_choose(order, k) + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
    return max(0.0, float(np.logaddexp.reduce(terms)))


def _log_choose(order: int, k: NDArray[np.int64]) -> Array:
    return np.asarray(_LOG_FACTORIAL[order] - _LOG_FACTORIAL[k] - _LOG_FACTORIAL[order - k])
