"""`server_app`: the round loop of every other run, with clients that are machines of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedflat.callbacks import Callback
from fedflat.experiment import Experiment
from fedflat.flower.backend import Flower
from fedflat.flower.facts import federation_of
from fedflat.flower.roll import Roll
from fedflat.method import Method
from fedflat.participation import Participants
from fedflat.result import Run, save
from fedflat.runner import run
from fedflat.task import Criterion

log = logging.getLogger(__name__)


def server_app(
    experiment: Experiment,
    *,
    test: Any = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    participants: Participants | None = None,
    out: str | Path | None = None,
    timeout: float = 600.0,
    wait: float = 600.0,
    callbacks: Sequence[Callback] = (),
    seed: int | None = None,
) -> ServerApp:
    """A Flower `ServerApp` that runs the experiment with `client_app`s, clients 0 to `experiment.clients` − 1.

    test: the common test set, if the server has one: a pair `(x, y)`, a map-style dataset, a `Federation`, of which the
        test set and `preprocess` are taken, or a function that gives one of these, called where the server runs.
    model, loss, participants, callbacks: as for `fedflat.run`.
    out: the run folder; `out` of the app's run configuration wins. Started again, the server goes on from its last
        round.
    timeout: seconds in which a client must answer; else it is left out of the round. wait: seconds in which all
        clients must have joined before the first round.
    seed: of what the server draws: who trains, noise. None is the experiment's, which every client knows, but with a
        method such as `dp`, whose promise that would void, one that is drawn here and kept in the run folder.
    """

    def main(grid: Grid, context: Context) -> None:
        place = context.run_config.get("out", out)
        folder = None if place is None else Path(str(place))
        roll = Roll(grid, experiment, folder)
        roll.gather(wait)
        facts = [roll.facts[client] for client in range(experiment.clients)]
        usual = roll.seed if any(part.discreet for part in Method.parse(experiment.method).parts) else experiment.seed
        run(
            experiment.replace(seed=usual if seed is None else seed),
            federation=federation_of(facts, test() if _is_function(test) else test),
            model=model,
            loss=loss,
            participants=participants,
            out=folder,
            progress=False,
            callbacks=[Journal(roll), *callbacks],
            engine=partial(Flower, roll=roll, timeout=timeout),
        )

    app = ServerApp()
    app.main()(main)
    return app


def _is_function(test: Any) -> bool:
    return isinstance(test, Callable) and not hasattr(test, "__len__")  # type: ignore[arg-type]


class Journal(Callback):
    """Writes down who has joined, and every round as it is done: what clients keep must not run ahead of the server."""

    def __init__(self, roll: Roll) -> None:
        self._roll = roll

    def start(self, run: Run) -> None:
        """Write down who has joined."""
        if run.out is not None:
            self._roll.save(run.out)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Save the round, and say how it went."""
        save(run)
        heard, left_out = metrics["clients"], metrics["left_out"]
        log.info("round %d: %d clients heard, %d left out", metrics["round"], heard, left_out)
