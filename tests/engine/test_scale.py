"""Millions of clients: nobody is looked at who does not take part, and what is kept of them fits into little memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, network, plain
from hypothesis import given
from hypothesis import strategies as st

import fedflat
from fedflat import Federation
from fedflat.runs.versions import Versions

CLIENTS = 1_000_000


class Lazy(Sequence[Any]):
    """A million clients, made when they are asked for; remembers who was."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.sizes = 3 + np.arange(CLIENTS) % 5

    def __len__(self) -> int:
        return CLIENTS

    def __getitem__(self, client: Any) -> Any:
        self.asked.add(client)
        return blobs(int(self.sizes[client]), seed=client)


class Forget(fedflat.Callback):
    """Forgets who was looked at before the first round."""

    def __init__(self, clients: Lazy) -> None:
        self.clients = clients

    def start(self, run: fedflat.Run) -> None:
        self.clients.asked.clear()


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "scaffold"])
def test_of_a_million_clients_only_those_drawn_are_asked_for_their_samples(tmp_path: Path, method: str) -> None:
    clients = Lazy()
    exp = plain(method=method, rounds=2, participation="uniform(20)", clients=CLIENTS)
    federation = Federation(clients, sizes=clients.sizes, classes=3)
    run = fedflat.run(
        exp, federation=federation, model=network(), out=tmp_path / "run", callbacks=[Forget(clients)], state_memory=0
    )
    assert len(clients.asked) == 40 and clients.asked == {row["client"] for row in run.clients}
    drawn = {int(path.name.split(".")[0]) for path in (tmp_path / "run" / "clients").glob("*/*")}
    assert drawn == (set() if method == "fedavg" else clients.asked)


def test_clients_who_are_never_drawn_do_not_change_the_average() -> None:
    """With whole batches, which no shuffling changes, the drawn clients alone give the same weights."""
    clients = Lazy()
    exp = plain(rounds=2, participation="uniform(10)", batch_size=0, clients=CLIENTS)
    large = fedflat.run(exp, federation=Federation(clients, sizes=clients.sizes, classes=3), model=network())
    drawn = sorted({row["client"] for row in large.clients})
    rounds = [[drawn.index(row["client"]) for row in large.clients if row["round"] == t] for t in (1, 2)]
    alone = Federation([clients[client] for client in drawn], classes=3)
    small = fedflat.run(
        exp.replace(clients=len(drawn)), federation=alone, model=network(), participants=lambda t: rounds[t]
    )
    assert torch.allclose(large.server_weights, small.server_weights, rtol=1e-12, atol=1e-14)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=60), st.integers(0, 60))
def test_rounds_of_clients_are_kept_as_in_a_dictionary(steps: list[tuple[int, int]], half: int) -> None:
    """A round of 0 stands for taking the client out."""
    rounds, dictionary = Versions(), dict[int, int]()
    earlier, before = rounds.copy(), dict(dictionary)
    for step, (client, round) in enumerate(steps):
        if step == half:
            earlier, before = rounds.copy(), dict(dictionary)
        if round:
            rounds[client] = dictionary[client] = round
        else:
            assert rounds.pop(client, None) == dictionary.pop(client, None)
    assert rounds == dictionary and len(rounds) == len(dictionary)
    assert dict(rounds.unlike(earlier)) == {k: v for k, v in dictionary.items() if before.get(k) != v}
    assert dict(earlier.unlike(rounds)) == {k: v for k, v in before.items() if dictionary.get(k) != v}
