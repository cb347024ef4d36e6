"""Which clients train in a round: the papers' sampling rules. Every round has its own random stream."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedflat import specs
from fedflat.core import streams
from fedflat.errors import InputError

Participants = Callable[[int], Iterable[int]] | Callable[[int, Tensor], Iterable[int]]
"""From the papers' round index t = 0, 1, … to the clients that train in it.

With a second parameter it is also given every client's last training loss, infinite for those that never took part.
"""


def all_clients(clients: int, seed: int) -> Participants:
    """All clients in every round."""
    return lambda t: range(clients)


def uniform(clients: int, seed: int, m: int) -> Participants:
    """m distinct clients, uniformly at random."""
    if not (isinstance(m, int) and 1 <= m <= clients):
        raise InputError(f"participation uniform({m}) samples {m} of {clients} clients: give 1 to {clients}")
    return lambda t: streams.stream(seed, "sampling", t).sample(clients, m).tolist()


def bernoulli(clients: int, seed: int, q: float) -> Participants:
    """Each client independently with probability q; the draw is repeated until it has at least one client."""
    if not 0 < q <= 1:
        raise InputError(f"participation bernoulli({q}): the probability must be above 0 and at most 1")
    if q * clients < 1e-3:
        raise InputError(f"participation bernoulli({q}) of {clients} clients: almost every draw would be empty")

    def draw(t: int) -> list[int]:
        stream = streams.stream(seed, "sampling", t)
        while True:
            joined = (stream.uniform(clients, torch.float64) < q).nonzero().flatten()
            if len(joined):
                return joined.tolist()

    return draw


def power_of_choice(clients: int, seed: int, m: int, d: int) -> Participants:
    """The m clients with the largest last training losses among d candidates, who are drawn uniformly at random.

    The variant rpow-d of Cho et al. (2020), in which nobody computes a loss for it; those never heard of come first.
    The paper draws candidates in proportion to their samples.
    """
    if not (isinstance(m, int) and isinstance(d, int) and 1 <= m <= d <= clients):
        raise InputError(
            f"participation power_of_choice(m={m}, d={d}): m of d of {clients} clients, so 1 ≤ m ≤ d ≤ {clients}"
        )

    def draw(t: int, losses: Tensor) -> list[int]:
        candidates = streams.stream(seed, "sampling", t).sample(clients, d)
        order = losses[candidates].argsort(descending=True, stable=True)
        return candidates[order[:m]].tolist()

    return draw


AUTO = "auto"  # stands for one of the laws; which one is decided when the data are known
LAWS: dict[str, Callable[..., Participants]] = {
    "all": all_clients,
    "uniform": uniform,
    "bernoulli": bernoulli,
    "power_of_choice": power_of_choice,
}


def participants(law: str, clients: int, seed: int) -> Participants:
    """The sampling rule that a string such as `"uniform(10)"` names."""
    return specs.build("participation", specs.parse(law), LAWS, clients, seed)


def sampling(law: str) -> tuple[str, float]:
    """The name of a sampling rule and its number: q of bernoulli, m of uniform, 1 for all.

    >>> sampling("uniform(m=10)")
    ('uniform', 10)
    """
    call = specs.parse(law)
    return call.name, next(iter((*call.args, *call.kwargs.values())), 1)


def looks_at_losses(choose: Callable[..., Iterable[int]]) -> bool:
    """Whether a function takes the last losses beside the round."""
    try:
        parameters = inspect.signature(choose).parameters.values()
    except ValueError:  # a function of C does not tell
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1


def checked(choose: Participants, clients: int) -> Callable[..., list[int]]:
    """`choose` with a check: no empty round, no client twice, no client that does not exist."""
    law: Callable[..., Iterable[int]] = choose

    def choice(t: int) -> list[int]:
        return _valid(t, law(t), clients)

    def informed_choice(t: int, losses: Tensor) -> list[int]:
        return _valid(t, law(t, losses), clients)

    return informed_choice if looks_at_losses(law) else choice


def _valid(t: int, given: Iterable[int], clients: int) -> list[int]:
    try:
        chosen = list(map(operator.index, given))
    except TypeError:
        raise InputError(f"participants({t}) must give a list of client numbers, such as [0, 3]") from None
    if not chosen:
        raise InputError(f"nobody takes part in round {t + 1}: participants({t}) is empty")
    if len(set(chosen)) != len(chosen):
        raise InputError(f"participants({t}) names a client twice: {sorted(chosen)}")
    if min(chosen) < 0 or max(chosen) >= clients:
        outside = next(i for i in chosen if not 0 <= i < clients)
        raise InputError(f"participants({t}) names client {outside}, but there are clients 0 to {clients - 1}")
    return chosen
