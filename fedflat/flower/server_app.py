"""`server_app`: the round loop of every other run, with clients that are machines of their own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedflat.core.method import Method
from fedflat.core.participation import Participants
from fedflat.engine.setup import Criterion
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.flower.admission import Admission
from fedflat.flower.backend import Flower
from fedflat.flower.data_summary import Blank, federation_of
from fedflat.flower.members import Members
from fedflat.flower.secagg import check_summable
from fedflat.flower.secrecy import owner_only
from fedflat.runs.callbacks import Callback
from fedflat.runs.result import Run
from fedflat.runs.runner import run

log = logging.getLogger(__name__)


def server_app(
    experiment: Experiment,
    *,
    test: Any = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    participants: Participants | None = None,
    admission: Admission | str | Path | None = None,
    trusted: Any = None,
    out: str | Path | None = None,
    timeout: float = 600.0,
    wait: float = 600.0,
    callbacks: Sequence[Callback] = (),
    seed: int | None = None,
    secagg: bool = False,
) -> ServerApp:
    """A Flower `ServerApp` that runs the experiment with `client_app`s, clients 0 to `experiment.clients` − 1.

    test: the common test set, if the server has one: a pair `(x, y)`, a map-style dataset, a `Federation`, of which the
        test set and `preprocess` are taken, or a function that gives one of these, called where the server runs.
    model, loss, participants, callbacks: as for `fedflat.run`.
    admission: who may join and with what, or a file that says it, such as `clients.toml` of a project; `clients` of
        the app's run configuration wins, and is empty for none. Classes and the form of samples are the list's, else
        the test set's. Where neither tells, a built-in model cannot be made, and the form is that of most clients.
    trusted: a small clean set of the server's own, like `test`, for methods such as `fltrust`.
    out: the run folder; `out` of the app's run configuration wins. Started again, the server goes on from its last
        round.
    timeout: seconds in which a client must answer; else it is left out of the round. wait: seconds in which all
        clients must have joined before the first round.
    seed: of what the server draws: who trains, noise. None is the experiment's, which every client knows, but with a
        method such as `dp`, whose promise that would void, one that is drawn here and kept in the run folder.
    secagg: learn only the sums of what clients send (SecAgg+), with `client_app(…, secagg=True)`. Methods whose server
        needs single updates are refused. Updates out of proportion cannot be told, nor can their senders.
    """
    if secagg:
        check_summable(experiment)

    def main(grid: Grid, context: Context) -> None:
        place = context.run_config.get("out", out)
        folder = None if place is None else Path(str(place))
        common = test() if _is_function(test) else test
        with owner_only(folder):
            listed = context.run_config.get("clients", admission)
            members = Members(grid, experiment, _admission(listed, common, experiment, model), folder)
            members.gather(wait)
            data = [members.data[client] for client in range(experiment.clients)]
            run(
                experiment.replace(seed=_seed(experiment, members) if seed is None else seed),
                federation=federation_of(data, common, _classes(members, model, loss), trusted),
                model=model,
                loss=loss,
                participants=participants,
                out=folder,
                progress=False,
                callbacks=[*callbacks, Journal(members)],  # last: it saves the row with what the others add
                engine=partial(Flower, members=members, timeout=timeout, secagg=secagg),
            )

    app = ServerApp()
    app.main()(main)
    return app


def _is_function(test: Any) -> bool:
    return isinstance(test, Callable) and not hasattr(test, "__len__")  # type: ignore[arg-type]


def _admission(given: Any, test: Any, experiment: Experiment, model: nn.Module | None) -> Admission:
    listed = given if isinstance(given, Admission) else Admission() if not given else Admission.read(Path(given))
    known = listed.completed(test, experiment.dtype)
    if known.classes is None and model is None:
        raise InputError(
            "no client decides how many classes there are: give server_app a test set, a model, or a list with "
            "`classes = …` as admission="
        )
    return known


def _classes(members: Members, model: nn.Module | None, loss: Criterion | None) -> int:
    """How many classes there are: as listed, else as many as a model of one's own tells apart."""
    first = next(iter(members.data.values()))
    if members.admission.classes or first.y[1].is_floating_point or model is None or loss is not None:
        return members.admission.classes or max(one.classes for one in members.data.values())
    x, _ = Blank(1, first, 1).batch(torch.zeros(1, dtype=torch.int64))
    trial = copy.deepcopy(model).to(x.dtype if x.is_floating_point() else None).eval()
    with torch.no_grad():
        return int(trial(x).shape[1])


def _seed(experiment: Experiment, members: Members) -> int:
    hides = any(part.hides_participation for part in Method.parse(experiment.method).parts)
    return members.seed if hides else experiment.seed


class Journal(Callback):
    """Writes down who has joined, and every round as it is done: what clients keep must not run ahead of the server."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def start(self, run: Run) -> None:
        """Write down who has joined."""
        if run.out is not None:
            self._members.save(run.out)

    def round(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Save the round, and say how it went."""
        run._state.save()
        heard, left_out = metrics["clients"], metrics["left_out"]
        log.info("round %d: %d clients heard, %d left out", metrics["round"], heard, left_out)
