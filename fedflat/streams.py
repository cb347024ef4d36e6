"""Randomness as a function of (seed, purpose, ids): no draw depends on what was drawn before it elsewhere.

A resumed run, a second worker or another back end asks for the same stream by the same name and gets the same numbers.
The global generators are left as found: code of the user's that reads them (dropout) runs inside `isolated`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit number that names one stream.

    >>> key(0, "sampling", 3) == key(0, "sampling", 3)
    True
    >>> key(0, "sampling", 3) == key(0, "sampling", 4)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_stream(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A CPU generator of PyTorch for one purpose, e.g. `torch_stream(0, "batches", round, client)`."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def numpy_stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator of NumPy for one purpose (Dirichlet and Beta draws live there)."""
    return np.random.default_rng(key(seed, purpose, *ids))


@contextmanager
def isolated(seed: int, purpose: str, *ids: int) -> Iterator[None]:
    """Seed the global generators of PyTorch, NumPy and Python inside the block; put them back as they were after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    number = key(seed, purpose, *ids)
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
