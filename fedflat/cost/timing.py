"""Seconds per round of several methods, measured so that other load on the machine matters little.

The methods take turns, and what counts is the time of the processor; on another device, which computes by itself, it
is elapsed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from fedflat.core.devices import CPU
from fedflat.core.processes import keep_pages, single_thread
from fedflat.data import Federation
from fedflat.engine.assembly import make_setup
from fedflat.engine.backends.serial import Serial
from fedflat.engine.round_loop import RoundLoop
from fedflat.engine.setup import fresh_server
from fedflat.experiment import Experiment
from fedflat.runs.store import ClientStore


def in_turns(
    experiments: Mapping[str, Experiment],
    federation: Federation,
    rounds: int,
    note: Callable[[int, str, float], None] = lambda round, name, seconds: None,
    clients: Sequence[int] | None = None,
) -> dict[str, list[float]]:
    """Measure the seconds of every round of every experiment, in this process, with one thread.

    The experiments take turns, one round each. A first round, number 0, is run and not returned.

    Args:
        experiments: Experiments by name.
        federation: The data.
        rounds: The number of rounds to time per experiment.
        note: Called after every round with its number, the experiment's name and the seconds.
        clients: Those that train in every round; None: all.

    Returns:
        The seconds of the rounds by name.
    """
    chosen = list(range(len(federation)) if clients is None else clients)
    with single_thread():
        keep_pages()  # as a worker process does
        loops = {name: _loop(experiment, federation, chosen) for name, experiment in experiments.items()}
        found: dict[str, list[float]] = {name: [] for name in experiments}
        for number in range(rounds + 1):
            for name, loop in loops.items():
                clock = time.process_time if loop.setup.device == CPU else time.perf_counter
                start = clock()
                loop.run_round()
                found[name].append(clock() - start)
                note(number, name, found[name][-1])
    return {name: seconds[1:] for name, seconds in found.items()}


def _loop(experiment: Experiment, federation: Federation, clients: list[int]) -> RoundLoop:
    setup = make_setup(experiment.replace(evaluate_every=0, rounds=1_000_000), federation=federation)
    return RoundLoop(setup, fresh_server(setup), Serial(setup), ClientStore(None), lambda t: clients)
