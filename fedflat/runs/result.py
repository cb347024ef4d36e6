"""`Run`: the user's view of a run, finished or not."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fedflat.core.fairness import Fairness
from fedflat.core.flat import MixedOutputs
from fedflat.core.private import Private
from fedflat.core.tensors import States, copied
from fedflat.engine.assembly import details
from fedflat.engine.evaluation import MODELS, Row, evaluated_broadcast, evaluated_weights, personal_weights
from fedflat.engine.setup import Job
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import save_figure
from fedflat.runs.records import check_metric, columns, record_of
from fedflat.runs.state import RunState, Tables, load_state
from fedflat.runs.tables import TABLES
from fedflat.words import parameters_told

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """A run, finished or not.

    Attributes:
        experiment: What was run.
    """

    def __init__(self, state: RunState | Tables) -> None:
        self.experiment, self._state = state.experiment, state
        self._model: tuple[int, nn.Module] | None = None  # round and module

    @property
    def metrics(self) -> list[Row]:
        """One dict per round."""
        return self._state.metrics

    @property
    def best(self) -> Row:
        """Round and leading metric of the best evaluation so far: {"round": …, "accuracy": …}."""
        return self._state.best

    @property
    def task(self) -> dict[str, Any]:
        """How to read the metrics: the task's name, the leading metric, direction and unit of each, test sets."""
        return dict(self.details.get("task", {}))

    @property
    def stopped(self) -> str:
        """Why a callback ended the run before its last round; empty otherwise."""
        return self._state.stopped

    @property
    def last_clients(self) -> list[Row]:
        """The rows of `clients` that the last round of this process added."""
        return list(self._state.last_clients)

    @property
    def last_evaluations(self) -> list[Row]:
        """The rows of `evaluations` that the last round of this process added."""
        return self._state.last_evaluations

    @property
    def details(self) -> dict[str, Any]:
        """What the experiment's fields do not tell: the number of parameters, the loss, and in a folder more."""
        return self._state.inputs or details(self._state.setup)

    @property
    def out(self) -> Path | None:
        """The run folder; None for a run in memory."""
        return self._state.folder.path if self._state.folder else None

    @property
    def status(self) -> str:
        """One of "finished", "stopped" (by a callback), "interrupted", "failed", "unfinished"."""
        if self._state.failure:
            return self._state.failure
        if self._state.finished:
            return "finished"
        return "stopped" if self.stopped else "unfinished"

    @property
    def clients(self) -> list[Row]:
        """One dict per round and participating client: samples, steps, loss, norm of its update, seconds."""
        return self._rows("clients")

    @property
    def evaluations(self) -> list[Row]:
        """One dict per evaluation and client that has its own test data.

        common, personal, adapted: accuracies (or the leading metric of the task) of the common model, of the client's
        personal model, and of a model adapted to it (None if there is no such model); other metrics are common_loss, …
        new: the client never trains. seen: it has trained before.
        """
        return self._rows("evaluations")

    def _rows(self, table: str) -> list[Row]:
        folder, state = self._state.folder, self._state
        return list(folder.rows(table, state.round) if folder else chain.from_iterable(getattr(state, table)))

    def fairness(self, model: str = "personal", *, new: bool = False, seen: bool | None = None) -> Fairness:
        """Distribution of the clients' accuracies, or their leading metric, at the last evaluation.

        Args:
            model: "personal" (or the common one, if the method has no personal models), "common" or "adapted".
            new: Only the clients that never train, instead of only the others.
            seen: Only the clients that have trained (True) or have never been sampled (False). If the method keeps
                part of the network on the clients, the latter have only an adapted model.
        """
        if model not in MODELS:
            raise UnknownNameError("model", model, MODELS)
        every = self.evaluations
        last = max((row["round"] for row in every), default=0)
        rows = [row for row in every if row["round"] == last and row["new"] == new]
        rows = [row for row in rows if seen is None or row["seen"] == seen]
        kinds = [name for name in MODELS if any(row[name] is not None for row in rows)]
        name = "common" if model == "personal" and model not in kinds and "common" in kinds else model
        if rows and name not in kinds:
            raise InputError(f"these clients have no {model} model; they have: {', '.join(kinds)}")
        values = (row[name] for row in rows if row[name] is not None)
        record = record_of(self)
        return Fairness.of(values, record.falls(record.lead))

    def table(self, name: str = "metrics") -> dict[str, np.ndarray]:
        """The table "metrics", "clients" or "evaluations", one array per column; nan where a row has no value."""
        if name not in TABLES:
            raise UnknownNameError("table", name, TABLES)
        return columns(getattr(self, name))

    def curve(self, metric: str = "") -> tuple[np.ndarray, np.ndarray]:
        """The rounds in which a metric was measured, and its values, as in `plt.plot(*run.curve("loss"))`."""
        record = record_of(self)
        metric = metric or record.lead
        check_metric(metric, [record])
        points = record.points(metric)
        rounds, values = zip(*points, strict=True) if points else ((), ())
        return np.array(rounds, dtype=int), np.array(values, dtype=float)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw accuracy and loss over the rounds with matplotlib, and save the figure if `path` is given."""
        from fedflat.report.figures import curves_figure

        figure = curves_figure([self])
        if path is not None:
            save_figure(figure, path)
        return figure

    def report(self, path: str | Path = "report.html") -> Path:
        """Write an HTML report of the run, as `fedflat report` does. Returns its path."""
        from fedflat.report.html import report

        return report([self], path)

    @property
    def server_weights(self) -> Tensor:
        """The server's weights, which it would send in the next round."""
        return self._state.server.theta.clone()

    @property
    def weights(self) -> Tensor:
        """The evaluated weights (see `Experiment.evaluated`)."""
        return evaluated_weights(self._state.setup, self._state.server).clone()

    @property
    def model(self) -> nn.Module:
        """A module with the evaluated weights, in evaluation mode.

        BatchNorm layers whose statistics stay on the clients use batch statistics, as in the run's metrics. The module
        is yours: it is the same one at every access until the run goes on.
        """
        round = self._state.round
        if self._model is None or self._model[0] != round:
            self._model = round, self._state.model
        return self._model[1]

    @property
    def server_state(self) -> States:
        """{part: {name: tensor}} that the method keeps on the server."""
        return copied(self._state.server.states)

    def client_state(self, client: int) -> States:
        """{part: {name: tensor}} that the method keeps for a client; empty if the client has never taken part."""
        self._check_client(client)
        return copied(self._state.store.get(client))

    def personal(self, client: int) -> nn.Module:
        """The personal model of a client, if the method keeps one."""
        self._check_client(client)
        setup, server = self._state.setup, self._state.server
        if setup.method.owner("adapt").adapts:
            raise InputError(
                f"the method {str(setup.method)!r} adapts models at evaluation and keeps no personal models"
            )
        states, model = self.client_state(client), setup.model
        generated = setup.method.filling("generate")
        theta = generated[0].generate(server, client) if generated else None
        setup.receive(evaluated_broadcast(setup, server), Job(client, states=states, theta=theta))
        own = personal_weights(setup, states)
        if own is None and Private.KEY not in states:
            owns = setup.method.filling("personal") or setup.private
            remedy = " yet: it has not trained in this run" if owns and not states else ""
            raise InputError(f"the method {str(setup.method)!r} keeps no personal model for client {client}{remedy}")
        if own is None:
            return model.export(model.theta, model.buffers, model.counters)
        found = model.export(own["theta"], own.get("buffers", model.buffers), model.counters)
        if "second" not in own:
            return found
        return MixedOutputs(found, model.export(own["second"], model.buffers, model.counters), float(own["share"]))

    def _check_client(self, client: int) -> None:
        clients = len(self._state.setup.federation)
        if not 0 <= client < clients:
            raise InputError(f"there is no client {client}: the run has clients 0 to {clients - 1}")

    def __repr__(self) -> str:
        done = f"{len(self.metrics)} of {self.experiment.rounds} rounds"
        lead = str(self.task.get("lead", "accuracy"))
        last = self.metrics[-1].get(lead) if self.metrics else None
        e, size = self.experiment, parameters_told(self.details)
        what = f"{e.method!r} on {e.data!r} ({e.clients} clients), {e.model} ({size})"
        return f"<Run {what}: {done}" + (f", {lead} {last:.4f}>" if last is not None else ">")

    def _repr_html_(self) -> str:
        from fedflat.report.notebook import summary

        return summary(record_of(self))


def load_run(path: str | Path, model: nn.Module | None = None) -> Run:
    """Load a run from its folder, finished or not.

    Args:
        model: The module, if the run used one of your own. Without it, tables, curves and reports are there, but no
            weights.
    """
    return Run(load_state(path, model))
