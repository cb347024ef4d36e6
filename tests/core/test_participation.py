"""The three laws of participation, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import network, plain, world

import fedflat
from fedflat.core.participation import checked, participants
from fedflat.errors import InputError


def test_all_is_everybody_every_round() -> None:
    assert [list(participants("all", 4, 0)(t)) for t in range(3)] == [[0, 1, 2, 3]] * 3


def test_uniform_gives_m_distinct_clients_each_equally_often() -> None:
    choose, rounds = participants("uniform(3)", 10, 0), 3000
    counts: Counter[int] = Counter()
    for t in range(rounds):
        chosen = list(choose(t))
        assert len(set(chosen)) == 3
        counts.update(chosen)
    deviation = math.sqrt(rounds * 0.3 * 0.7)
    assert all(abs(counts[i] - 0.3 * rounds) < 5 * deviation for i in range(10))


def test_bernoulli_joins_each_client_independently_with_probability_q() -> None:
    choose, rounds, clients, q = participants("bernoulli(0.2)", 50, 0), 1000, 50, 0.2
    joined = torch.zeros(rounds, clients, dtype=torch.float64)
    for t in range(rounds):
        joined[t, list(choose(t))] = 1
    deviation = math.sqrt(q * (1 - q))
    assert abs(joined.mean().item() - q) < 5 * deviation / math.sqrt(rounds * clients)
    assert ((joined.mean(0) - q).abs() < 5 * deviation / math.sqrt(rounds)).all()
    # A sum of independent joins has the binomial variance.
    assert joined.sum(1).var().item() == pytest.approx(clients * q * (1 - q), rel=0.3)


def test_bernoulli_is_never_empty() -> None:
    choose = participants("bernoulli(0.05)", 3, 0)
    assert all(list(choose(t)) for t in range(500))


@pytest.mark.parametrize("law", ["uniform(3)", "bernoulli(0.3)"])
def test_a_rounds_choice_depends_on_seed_and_round_alone(law: str) -> None:
    forward = [list(participants(law, 20, 5)(t)) for t in range(20)]
    choose = participants(law, 20, 5)
    assert [list(choose(t)) for t in reversed(range(20))] == forward[::-1]
    assert forward != [list(participants(law, 20, 6)(t)) for t in range(20)]


@pytest.mark.parametrize(
    "law",
    [
        "uniform(11)",
        "uniform(0)",
        "uniform(-1)",
        "uniform(0.5)",
        "uniform",
        "uniform('3')",
        "bernoulli(0)",
        "bernoulli(1.5)",
        "bernoulli(-0.1)",
        "bernoulli",
        "bernoulli('0.1')",
        "uniform(3, 4)",
        "unifrom(3)",
        "all(3)",
        "power_of_choice(3)",
        "power_of_choice(m=4, d=3)",
        "power_of_choice(m=4, d=11)",
    ],
)
def test_a_law_that_cannot_be_followed_is_refused(law: str) -> None:
    with pytest.raises(InputError):
        participants(law, 10, 0)


def test_more_clients_than_exist_says_how_many_there_are() -> None:
    with pytest.raises(InputError, match=r"11 of 10 clients"):
        participants("uniform(11)", 10, 0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [([], "nobody takes part in round 3"), ([1, 1], "twice"), ([0, 4], "client 4"), ([-1], "client -1")],
)
def test_a_callables_mistake_is_named(chosen: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(lambda t: chosen, 4)(2)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, iter, set])
def test_a_callable_says_who_trains(kind: Any) -> None:
    run = fedflat.run(plain(rounds=2), federation=world(), model=network(), participants=lambda t: kind([t, 2]))
    assert [(row["round"], row["client"]) for row in run.clients] == [(1, 0), (1, 2), (2, 1), (2, 2)]
    assert [row["clients"] for row in run.metrics] == [2, 2]


def test_the_order_in_which_participants_are_named_does_not_matter() -> None:
    one, other = (
        fedflat.run(plain(rounds=2), federation=world(), model=network(), participants=lambda t, s=step: [0, 1, 2][::s])
        for step in (1, -1)
    )
    assert torch.equal(one.weights, other.weights)


def test_a_run_with_more_participants_than_clients_is_refused() -> None:
    with pytest.raises(InputError, match="uniform"):
        fedflat.run(plain(participation="uniform(4)"), federation=world(), model=network())


def test_power_of_choice_takes_the_largest_losses_of_the_candidates() -> None:
    """With all clients as candidates: those never heard of first, then the m with the largest last losses."""
    run = fedflat.run(plain(rounds=6, participation="power_of_choice(m=1, d=3)"), federation=world(), model=network())
    last: dict[int, float] = {}
    for row in run.clients:
        if len(last) < 3:
            assert row["client"] not in last
        else:
            assert last[row["client"]] == max(last.values())
        last[row["client"]] = row["loss"]
    assert len(run.clients) == 6


def test_an_own_law_may_look_at_the_last_losses_and_resumes_with_them(tmp_path: Path) -> None:
    """The opposite of power-of-choice, ten rounds at once and in two pieces."""

    def modest(t: int, losses: torch.Tensor) -> list[int]:
        seen.append(losses.tolist())
        return [t] if t < 3 else [int(losses.argmin())]

    class Break(fedflat.Callback):
        def round(self, run: fedflat.Run, metrics: Any) -> bool:
            return metrics["round"] == 4

    seen: list[list[float]] = []
    given: dict[str, Any] = {"federation": world(), "model": network(), "participants": modest}
    whole = fedflat.run(plain(rounds=6), **given)
    assert seen[0] == [math.inf] * 3 and seen[1][0] == whole.clients[0]["loss"] and seen[1][1:] == [math.inf] * 2
    fedflat.run(plain(rounds=6), **given, out=tmp_path, callbacks=[Break()])
    again = fedflat.run(plain(rounds=6), **given, out=tmp_path)
    assert [row["client"] for row in again.clients] == [row["client"] for row in whole.clients]
    assert again.weights.equal(whole.weights)
