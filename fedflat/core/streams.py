"""Randomness as a function of (seed, purpose, ids): no draw depends on what was drawn before it elsewhere.

A resumed run, a second worker or another back end asks for the same stream by the same name and gets the same numbers.
Every stream is NumPy's Philox, a counter-based generator, under a key of its own: 128 bits of a cryptographic hash of
the name, so no two streams meet. The global generators stay as they are: code that reads them (dropout) runs inside
`isolated`.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

WORDS = 624  # of the state of a Mersenne Twister, which the global generators are
TWISTER = np.dtype([("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", WORDS)])
"""How torch's CPU generator starts the bytes of its state; what follows is the second half of a pair of normals."""


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 128-bit number that names one stream.

    >>> key(0, "sampling", 3) == key(0, "sampling", 3)
    True
    >>> key(0, "sampling", 3) == key(0, "sampling", 4)
    False
    """
    return int.from_bytes(_digest(seed, purpose, *ids), "little")


def _digest(seed: int, purpose: str, *ids: int) -> bytes:
    return hashlib.blake2b(_text(seed, purpose, *ids).encode(), digest_size=16).digest()


def _text(seed: int, purpose: str, *ids: object) -> str:
    return "/".join([str(seed), str(len(purpose)), purpose, *map(str, ids)])  # the length: "a/1" is not ("a", 1)


def of_part(name: str) -> str:
    """The purpose of a part's own draws; no name that somebody gives a part meets a purpose of the engine."""
    return f"part {name}"


class _Key(ISeedSequence):
    """A key for Philox as it is; `Philox(key=…)` first asks the system for randomness that it throws away."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
        """The key as two words of 64 bits, which is what Philox asks for."""
        return np.frombuffer(self.digest, "<u8")


def _philox(digest: bytes) -> np.random.Philox:
    return np.random.Philox(_Key(digest))  # type: ignore[arg-type]  # NumPy takes any ISeedSequence, its stub does not


def numpy_stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator of NumPy for one purpose (Dirichlet and Beta draws live there)."""
    return np.random.Generator(_philox(_digest(seed, purpose, *ids)))


def stream(seed: int, purpose: str, *ids: int) -> Stream:
    """The stream of one purpose that draws tensors, e.g. `stream(0, "batches", round, client)`."""
    return Stream(lambda: numpy_stream(seed, purpose, *ids))


class Stream:
    """Draws of a generator as tensors on the CPU.

    Args:
        make: Makes the generator, at the first draw: many streams are passed on and never drawn from.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], np.random.Generator]) -> None:
        self._make = make
        self._made: np.random.Generator | None = None

    @property
    def numpy(self) -> np.random.Generator:
        """The generator; what this class does not have can be drawn from it."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def permutation(self, count: int) -> Tensor:
        """The numbers 0 to count - 1 in random order."""
        return torch.from_numpy(self.numpy.permutation(count))

    def permutations(self, count: int) -> Iterator[Tensor]:
        """One permutation after the other."""
        while True:
            yield self.permutation(count)

    def sample(self, count: int, size: int) -> Tensor:
        """`size` different numbers of 0 to count - 1 in random order, in time and memory of `size`."""
        return torch.from_numpy(self.numpy.choice(count, size, replace=False))

    def integers(self, high: int, shape: int | Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers of 0 to high - 1, uniformly."""
        return torch.from_numpy(self.numpy.integers(high, size=shape, dtype=_numpy(dtype)))

    def uniform(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers in [0, 1), uniformly."""
        return self._floats(self.numpy.random, shape, dtype)

    def normal(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return self._floats(self.numpy.standard_normal, shape, dtype)

    def _floats(self, draw: Any, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        kind = np.float64 if dtype == torch.float64 else np.float32
        return torch.from_numpy(np.asarray(draw(shape, dtype=kind))).to(dtype)


class NoStream(Stream):
    """Instead of a stream, to find out whether anything draws: a draw raises `DrawnError`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(self._refuse)

    def _refuse(self) -> np.random.Generator:
        raise DrawnError


class DrawnError(Exception):
    """Something draws from a `NoStream`."""


class _Shuffler(threading.local):
    """One generator of a thread, which is given one key after the other: cheaper than a generator for each."""

    def __init__(self) -> None:
        self._philox = _philox(bytes(16))
        self._generator, self._fresh = np.random.Generator(self._philox), self._philox.state

    def under(self, key: np.ndarray) -> np.random.Generator:
        """The generator at the beginning of a stream, given its key as two words; valid until the next call."""
        self._fresh["state"]["key"] = key
        self._philox.state = self._fresh
        return self._generator


_SHUFFLER = _Shuffler()


def permutation(count: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """The first permutation of a stream that is used for nothing else; faster than to make the stream."""
    return torch.from_numpy(_SHUFFLER.under(_words(_digest(seed, purpose, *ids))).permutation(count))


def permutations(
    counts: Sequence[int], times: Sequence[int], seed: int, purpose: str, first: int, last: Iterable[int]
) -> np.ndarray:
    """The first permutations of the streams (seed, purpose, first, one of last) as rows: so many of each, of so many.

    Shorter ones are followed by any numbers.

    >>> permutations([3, 2], [1, 1], 0, "batches", 1, [7, 9]).shape
    (2, 1, 3)
    """
    begun = hashlib.blake2b(_text(seed, purpose, first, "").encode(), digest_size=16)

    def digest(number: int) -> bytes:
        ended = begun.copy()
        ended.update(b"%d" % number)
        return ended.digest()

    found = np.empty((len(counts), max(times), max(counts)), np.int64)
    found[:] = np.arange(found.shape[2])
    keys, under = _words(b"".join(map(digest, last))).reshape(-1, 2), _SHUFFLER.under
    for rows, count, often, key in zip(found, counts, times, keys, strict=True):
        shuffle = under(key).shuffle  # of 0, 1, … in place, which draws what `permutation` does
        for k in range(often):
            shuffle(rows[k, :count])
    return found


def _words(digests: bytes) -> np.ndarray:
    return np.frombuffer(digests, "<u8")


def _numpy(dtype: torch.dtype) -> Any:
    return getattr(np, str(dtype).removeprefix("torch."))


class Generators(Protocol):
    """Global generators of other devices than the CPU."""

    def state(self) -> Any:
        """Their state."""

    def restore(self, state: Any) -> None:
        """The inverse of `state`."""

    def seed(self, number: int) -> None:
        """Seed all of them."""


ELSEWHERE: list[Generators] = []
"""What `seed_global` seeds besides the CPU's; `core.devices` adds its own."""


@contextmanager
def isolated(seed: int, purpose: str, *ids: int) -> Iterator[None]:
    """Seed the global generators of PyTorch, NumPy and Python inside the block; put them back as they were after it."""
    with preserved():
        seed_global(seed, purpose, *ids)
        yield


@contextmanager
def preserved() -> Iterator[None]:
    """Put the global generators back as they were after the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    elsewhere = [generators.state() for generators in ELSEWHERE]
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for generators, state in zip(ELSEWHERE, elsewhere, strict=True):
            generators.restore(state)


def global_states() -> tuple[object, ...]:
    """The states of the global generators, to be compared: they stay equal as long as nothing draws."""
    elsewhere = [str(generators.state()) for generators in ELSEWHERE]
    return torch.get_rng_state().numpy().tobytes(), _numpy_state(), random.getstate(), elsewhere


def _numpy_state() -> object:
    """The state of NumPy's global generator. Its words are read where they are: to ask for them costs a small step."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return repr(np.random.get_state(legacy=False))
    words = ctypes.string_at(generator.ctypes.state_address, 4 * WORDS + 4)  # and the position among them
    if words != _LOOKED_AT[0]:
        state: Any = np.random.get_state(legacy=False)
        if state["has_gauss"]:  # the second half of a pair of normals: drawing it leaves the words as they are
            return words, state["gauss"]
        _LOOKED_AT[0] = words
    return words


_LOOKED_AT = [b""]  # words of a state that is known to hold no half of a pair; only a draw that changes them makes one


def seed_global(seed: int, purpose: str, *ids: int) -> None:
    """Seed the global generators, for code that reads them; inside `preserved`, or in a process of one's own.

    Each is a Mersenne Twister that is given all bits of the stream's key. `torch.manual_seed` would take 32 of them.
    """
    digest = _digest(seed, purpose, *ids)
    torch.set_rng_state(_twister(digest))
    np.random.seed(np.frombuffer(digest, "<u4"))
    random.seed(digest)
    for generators in ELSEWHERE:
        generators.seed(int.from_bytes(digest[:8], "little"))


def global_generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A generator that draws what PyTorch's global one does after `seed_global`."""
    generator = torch.Generator()
    generator.set_state(_twister(_digest(seed, purpose, *ids)))
    return generator


def _twister(digest: bytes) -> Tensor:
    """The state of torch's CPU generator whose words are the first draws of a stream."""
    state = np.zeros(torch.get_rng_state().numel(), np.uint8)
    fields = state[: TWISTER.itemsize].view(TWISTER)[0]
    fields["left"] = fields["seeded"] = 1  # one: the next draw makes new words of these
    fields["words"] = _philox(digest).random_raw(WORDS) >> 32
    return torch.from_numpy(state)
