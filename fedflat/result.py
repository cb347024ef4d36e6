"""`Run`: a result, in memory or on disk, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from fedflat.assembly import assemble
from fedflat.data import Federation
from fedflat.errors import CheckpointError, InputError, UnknownNameError
from fedflat.examine import MODELS, personal_weights
from fedflat.fairness import Fairness
from fedflat.folder import TABLES, Checkpoint, RunFolder
from fedflat.method import Server, State, copied
from fedflat.private import Private
from fedflat.server import Row, evaluated_buffers, evaluated_weights, fresh_server
from fedflat.statistics import use_batch
from fedflat.store import ClientStore, flatten, nest
from fedflat.task import Job, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """A run, finished or under way.

    experiment: what was run. metrics: one dict a round. out: its folder, if it has one.
    server_weights: the vector that would be sent next. weights: the vector that is evaluated.
    stopped: why a callback ended the run before its last round; empty otherwise.
    last_clients, last_evaluations: the rows of `clients` and `evaluations` that the newest round of this process added.
    """

    def __init__(self, task: Task, server: Server, store: ClientStore, folder: RunFolder | None) -> None:
        self.experiment, self._task, self._server = task.experiment, task, server
        self._store, self._folder = store, folder
        self.metrics: list[Row] = []
        self._clients: list[Row] = []
        self._evaluations: list[Row] = []
        self.last_clients: list[Row] = []
        self.last_evaluations: list[Row] = []
        self.best: dict[str, Any] = {"round": 0, "accuracy": -1.0}
        self.stopped, self._failure = "", ""
        self._inputs: dict[str, Any] = {}

    @property
    def out(self) -> Path | None:
        """The run folder."""
        return self._folder.path if self._folder else None

    @property
    def status(self) -> str:
        """How far it came: "finished", "stopped" by a callback, "interrupted", "failed", or "unfinished"."""
        if self._failure:
            return self._failure
        if self._server.round == self.experiment.rounds:
            return "finished"
        return "stopped" if self.stopped else "unfinished"

    @property
    def clients(self) -> list[Row]:
        """One dict per round and client that took part: samples, steps, loss, norm of its update, seconds."""
        return self._folder.rows("clients", self._server.round) if self._folder else self._clients

    @property
    def evaluations(self) -> list[Row]:
        """One dict per evaluation and client with test data of its own: accuracy of its models.

        common, personal, adapted: accuracies of the model all share, of the client's own, and of one adapted to it
        (None where there is none). new: never trains. seen: has trained before.
        """
        return self._folder.rows("evaluations", self._server.round) if self._folder else self._evaluations

    def fairness(self, model: str = "personal", *, new: bool = False, seen: bool | None = None) -> Fairness:
        """Distribution of the clients' accuracies at the last evaluation.

        model: "personal" (the common one where the method has no other), "common" or "adapted". new: of the clients
        that never train. seen: only those that have trained (True) or that were never drawn (False); where part of the
        network stays with the clients, such as these have an adapted model only.
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
            raise InputError(f"these clients have no {model} model to judge; they have: {', '.join(kinds)}")
        return Fairness.of(row[name] for row in rows if row[name] is not None)

    def table(self, name: str = "metrics") -> dict[str, np.ndarray]:
        """ "metrics", "clients" or "evaluations" as arrays, one a column; nan where a row has no number."""
        from fedflat.report.notebook import columns

        if name not in TABLES:
            raise UnknownNameError("table", name, TABLES)
        return columns(getattr(self, name))

    def curve(self, metric: str = "accuracy") -> tuple[np.ndarray, np.ndarray]:
        """Rounds and values of a metric where it was measured, as in `plt.plot(*run.curve("loss"))`."""
        from fedflat.report.records import check_metric, record_of

        record = record_of(self)
        check_metric(metric, [record])
        points = record.points(metric)
        rounds, values = zip(*points, strict=True) if points else ((), ())
        return np.array(rounds, dtype=int), np.array(values, dtype=float)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Accuracy and loss over the rounds, drawn with matplotlib; path: a file to write them to as well."""
        from fedflat.extras import save_figure
        from fedflat.report.figures import curves_figure

        figure = curves_figure([self])
        if path is not None:
            save_figure(figure, path)
        return figure

    def report(self, path: str | Path = "report.html") -> Path:
        """Write all there is to see of the run to one HTML file; see `fedflat report`. Returns its path."""
        from fedflat.report.html import report

        return report([self], path)

    @property
    def server_weights(self) -> Tensor:
        """The server's weights, as sent in the next round."""
        return self._server.theta.clone()

    @property
    def weights(self) -> Tensor:
        """The evaluated weights (see `Experiment.evaluated`)."""
        return evaluated_weights(self._task, self._server).clone()

    @property
    def model(self) -> nn.Module:
        """A module with the evaluated weights, in evaluation mode.

        BatchNorm layers whose statistics stay with the clients normalise by the batch, as in the run's metrics.
        """
        module = self._task.model.export(self.weights, *evaluated_buffers(self._server))
        use_batch(module, self._task.private.names)
        return module

    @property
    def server_state(self) -> dict[str, State]:
        """{part: {name: tensor}} that the method keeps on the server."""
        return copied(self._server.states)

    def client_state(self, client: int) -> dict[str, State]:
        """{part: {name: tensor}} that the method keeps for a client; empty for one that never took part."""
        self._check_client(client)
        return copied(self._store.get(client))

    def personal(self, client: int) -> nn.Module:
        """Client `client`'s own model, for the methods that keep one."""
        self._check_client(client)
        task, server = self._task, self._server
        if task.method.owner("adapt").adapts:
            raise InputError(
                f"the method {str(task.method)!r} fits its models at evaluation and keeps no personal model"
            )
        states, model = copied(self._store.get(client)), task.model
        generated = task.method.filling("generate")
        theta = generated[0].generate(server, client) if generated else self.weights
        job = Job(server.round, client, server.lr, 0.0, theta, *evaluated_buffers(server), states=states)
        task.receive(job)
        own = personal_weights(task, states)
        if own is None and Private.KEY not in states:
            raise InputError(f"the method {str(task.method)!r} keeps no personal model for client {client}")
        if own is None:
            return model.export(model.theta, model.buffers, model.counters)
        return model.export(own["theta"], own.get("buffers", model.buffers), model.counters)

    def _check_client(self, client: int) -> None:
        clients = len(self._task.federation)
        if not 0 <= client < clients:
            raise InputError(f"there is no client {client}: the run has clients 0 to {clients - 1}")

    def __repr__(self) -> str:
        done = f"{len(self.metrics)} of {self.experiment.rounds} rounds"
        last = self.metrics[-1]["accuracy"] if self.metrics else None
        return f"<Run {self.experiment.method!r}: {done}" + (f", accuracy {last:.4f}>" if last is not None else ">")

    def _repr_html_(self) -> str:
        from fedflat.report.notebook import summary
        from fedflat.report.records import record_of

        return summary(record_of(self))


def load_run(path: str | Path, model: nn.Module | None = None) -> Run:
    """A run from its folder, finished or not. model: the module it was made with, if that was your own."""
    folder = RunFolder(path)
    experiment, checkpoint = folder.experiment(), folder.load_checkpoint()
    if checkpoint is None:
        raise CheckpointError(
            f"{path} has no checkpoint yet: the run has not come to its first one; the command that began it goes on"
        )
    inputs = checkpoint.plain["inputs"]
    if model is None and inputs["custom_model"]:
        raise CheckpointError(f"{path} was run with a model of your own: load_run(path, model=that_module)")
    nobody = _Nobody(inputs["clients"])
    placeholder = Federation(nobody, sizes=nobody, classes=inputs["classes"])
    task = assemble(experiment, placeholder, model, shape=inputs["shape"] and tuple(inputs["shape"]))
    result = Run(task, fresh_server(task), ClientStore(folder.path / "clients"), folder)
    restore(result, checkpoint)
    return result


class _Nobody(Sequence[Any]):
    """So many clients of which nothing is known but the number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise CheckpointError("a run loaded from its folder has no training data")


def restore(result: Run, checkpoint: Checkpoint, *, prune: bool = False) -> None:
    """Put a run where a checkpoint was. prune: delete client states of later rounds, when the run is to go on."""
    server, tensors = result._server, checkpoint.tensors
    if tensors["server/theta"].shape != server.theta.shape:
        raise CheckpointError(f"{result.out} belongs to a model of another size")
    server.theta, server.buffers = tensors.pop("server/theta"), tensors.pop("server/buffers")
    server.counters = tensors.pop("server/counters")
    server.states = nest({key.removeprefix("state/"): t for key, t in tensors.items()})
    server.round = checkpoint.plain["round"]
    result.best, result._inputs = checkpoint.plain["best"], checkpoint.plain["inputs"]
    result.stopped = checkpoint.plain.get("stopped", "")
    result._store.restore(checkpoint.versions, prune=prune)
    assert result._folder is not None
    result.metrics = result._folder.rows("metrics", server.round)
    if [row["round"] for row in result.metrics] != list(range(1, server.round + 1)):
        path = result._folder.path / "metrics.jsonl"
        raise CheckpointError(f"{path} lacks some of the first {server.round} rounds; nothing was deleted")


def save(result: Run) -> None:
    """Write a checkpoint and the evaluated model."""
    folder, server = result._folder, result._server
    if folder is None:
        result._store.secure()
        return
    versions = result._store.flush()
    tensors = {
        "server/theta": server.theta,
        "server/buffers": server.buffers,
        "server/counters": server.counters,
    }
    tensors |= {f"state/{key}": t for key, t in flatten(server.states).items()}
    plain = {"round": server.round, "best": result.best, "stopped": result.stopped, "inputs": result._inputs}
    folder.save_checkpoint(Checkpoint(tensors, plain, versions))
    result._store.settle()
    folder.save_weights("model", result.model.state_dict(), {"round": str(server.round)})
