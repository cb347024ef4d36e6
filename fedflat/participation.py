"""Who trains in a round: the three laws of the papers, each drawn from its own stream of the round."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch

from fedflat import calls, streams
from fedflat.errors import InputError

Participants = Callable[[int], Iterable[int]]
"""From the papers' round index t = 0, 1, … to the clients that train in it."""


def all_clients(clients: int, seed: int) -> Participants:
    """Every client, every round."""
    return lambda t: range(clients)


def uniform(clients: int, seed: int, m: int) -> Participants:
    """m distinct clients, all sets equally likely."""
    if not (isinstance(m, int) and 1 <= m <= clients):
        raise InputError(f"participation uniform({m}) samples {m} of {clients} clients: give 1 to {clients}")
    return lambda t: torch.randperm(clients, generator=streams.torch_stream(seed, "sampling", t))[:m].tolist()


def bernoulli(clients: int, seed: int, q: float) -> Participants:
    """Each client on its own with probability q; the whole draw is repeated if nobody joined."""
    if not 0 < q <= 1:
        raise InputError(f"participation bernoulli({q}): the probability must be above 0 and at most 1")
    if q * clients < 1e-3:
        raise InputError(f"participation bernoulli({q}) of {clients} clients: hardly a round would have anybody in it")

    def draw(t: int) -> list[int]:
        generator = streams.torch_stream(seed, "sampling", t)
        while True:
            joined = (torch.rand(clients, generator=generator, dtype=torch.float64) <= q).nonzero().flatten()
            if len(joined):
                return joined.tolist()

    return draw


LAWS: dict[str, Callable[..., Participants]] = {
    "all": all_clients,
    "uniform": uniform,
    "bernoulli": bernoulli,
}


def participants(law: str, clients: int, seed: int) -> Participants:
    """The law that a string such as `"uniform(10)"` names."""
    return calls.build("participation", calls.parse(law), LAWS, clients, seed)


def sampling(law: str) -> tuple[str, float]:
    """The name of a law and its number, as given: q of bernoulli, m of uniform, 1 for all.

    >>> sampling("uniform(m=10)")
    ('uniform', 10)
    """
    call = calls.parse(law)
    return call.name, next(iter((*call.args, *call.kwargs.values())), 1)


def checked(choose: Participants, clients: int) -> Callable[[int], list[int]]:
    """`choose`, refusing what cannot be trained: nobody, a client twice, or one that does not exist."""

    def choice(t: int) -> list[int]:
        try:
            chosen = [operator.index(i) for i in choose(t)]
        except TypeError:
            raise InputError(f"participants({t}) must give a list of client numbers, such as [0, 3]") from None
        if not chosen:
            raise InputError(f"nobody takes part in round {t + 1}: participants({t}) is empty")
        if len(set(chosen)) != len(chosen):
            raise InputError(f"participants({t}) names a client twice: {sorted(chosen)}")
        outside = [i for i in chosen if not 0 <= i < clients]
        if outside:
            raise InputError(f"participants({t}) names client {outside[0]}, but there are clients 0 to {clients - 1}")
        return chosen

    return choice
