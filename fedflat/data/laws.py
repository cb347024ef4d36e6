"""Draws of Dirichlet laws, in logarithms, and checks of their parameters."""

from __future__ import annotations

import numpy as np

from fedflat.errors import PartitionError


def log_dirichlet(rng: np.random.Generator, concentration: np.ndarray) -> np.ndarray:
    """Logarithms of a Dirichlet draw along the last axis, up to a constant; no concentration is too small.

    Gamma(a) is Gamma(a + 1) · U^(1/a) in law, which in logarithms never underflows.
    """
    gammas = np.log(rng.standard_gamma(concentration + 1.0))
    draw: np.ndarray = gammas + np.log1p(-rng.random(concentration.shape)) / concentration
    return draw


def softmax(logs: np.ndarray) -> np.ndarray:
    """Normalised exponentials along the last axis; minus infinity stands for 0."""
    weights: np.ndarray = np.exp(logs - logs.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def positive(name: str, value: float) -> float:
    """Refuse a concentration that is not a positive number."""
    if not 0 < value < float("inf"):
        raise PartitionError(f"{name}={value} must be a positive number")
    return value
