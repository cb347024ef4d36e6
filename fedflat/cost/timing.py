"""Seconds a round of several methods, which take turns so that whatever else the machine does disturbs all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from fedflat.assembly import make_task
from fedflat.backends.pool import keep_pages
from fedflat.backends.serial import Serial
from fedflat.data import Federation
from fedflat.experiment import Experiment
from fedflat.server import RoundLoop, fresh_server
from fedflat.store import ClientStore


def in_turns(
    experiments: Mapping[str, Experiment],
    federation: Federation,
    rounds: int,
    note: Callable[[int, str, float], None] = lambda round, name, seconds: None,
) -> dict[str, list[float]]:
    """Seconds of every round of every experiment, all clients taking part, in this process with one thread.

    A round of each follows a round of each; one before the first is run and left out. note: called after every round
    with its number (0 for the one left out), the experiment's name, and its seconds.
    """
    everybody = list(range(len(federation)))
    with one_thread():
        loops = {name: _loop(experiment, federation, everybody) for name, experiment in experiments.items()}
        found: dict[str, list[float]] = {name: [] for name in experiments}
        for number in range(rounds + 1):
            for name, loop in loops.items():
                start = time.monotonic()
                loop.run_round()
                found[name].append(time.monotonic() - start)
                note(number, name, found[name][-1])
    return {name: seconds[1:] for name, seconds in found.items()}


def _loop(experiment: Experiment, federation: Federation, clients: list[int]) -> RoundLoop:
    task = make_task(experiment.replace(evaluate_every=0, rounds=1_000_000), federation=federation)
    return RoundLoop(task, fresh_server(task), Serial(task), ClientStore(None), lambda t: clients)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as a worker process does: one thread, an allocator that keeps its pages."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_pages()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
