"""The state of a run, and how it is saved and restored; `Run` is the user's view of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.core.batchnorm import use_batch
from fedflat.core.tensors import copied, flatten, nest
from fedflat.core.views import Server
from fedflat.data.federation import Federation
from fedflat.engine.assembly import assemble
from fedflat.engine.evaluation import Row, evaluated_buffers, evaluated_weights
from fedflat.engine.setup import Setup, fresh_server
from fedflat.errors import CheckpointError, InputError, UnknownNameError
from fedflat.experiment import Experiment
from fedflat.runs.checkpoint import Checkpoint, identity
from fedflat.runs.files import read_tensors
from fedflat.runs.folder import RunFolder
from fedflat.runs.store import ClientStore
from fedflat.tasks.task import TASKS, Classification
from fedflat.words import shortened


@dataclass
class RunState:
    """A run between two rounds.

    Attributes:
        metrics: One row per round.
        clients, evaluations: The tables of a run without a folder, one block of rows per round.
        last_clients, last_evaluations: The rows that the last round of this process added.
        best: Round and leading metric of the best evaluation so far; only {"round": 0} before the first.
        unwritten: Whether the newest row of metrics is not in the folder yet, as callbacks may add to it.
        stopped: Why a callback ended the run before its last round; empty otherwise.
        failure: "interrupted" or "failed"; empty otherwise.
        inputs: Identifies the data and the model; see `describe_inputs`.
    """

    setup: Setup
    server: Server
    store: ClientStore
    folder: RunFolder | None = None
    metrics: list[Row] = field(default_factory=list)
    clients: list[Sequence[Row]] = field(default_factory=list)
    evaluations: list[Sequence[Row]] = field(default_factory=list)
    last_clients: Sequence[Row] = ()
    last_evaluations: list[Row] = field(default_factory=list)
    best: Row = field(default_factory=lambda: {"round": 0})
    unwritten: bool = False
    stopped: str = ""
    failure: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def experiment(self) -> Experiment:
        """What is run."""
        return self.setup.experiment

    @property
    def round(self) -> int:
        """The last round done."""
        return self.server.round

    @property
    def finished(self) -> bool:
        """Whether the last round is done."""
        return self.round >= self.experiment.rounds

    @property
    def model(self) -> nn.Module:
        """A new module with the evaluated weights, in evaluation mode."""
        weights = evaluated_weights(self.setup, self.server)
        module = self.setup.model.export(weights, *evaluated_buffers(self.server))
        use_batch(module, self.setup.private.names)
        return module

    def record(self, metrics: Row, clients: Sequence[Row], evaluations: list[Row]) -> None:
        """Add a round to the tables. Call `write_metrics` afterwards, when callbacks have seen it."""
        self.last_clients, self.last_evaluations = clients, evaluations
        better = self._is_better(metrics)
        if better:
            self.best = {"round": metrics["round"], self.setup.lead: metrics[self.setup.lead]}
        if self.folder is None:
            self.clients.append(clients)
            self.evaluations.append(evaluations)
        else:
            self.folder.append("clients", clients)
            self.folder.append("evaluations", evaluations)
            if better:
                self.folder.save_weights("best", self.model.state_dict(), self.about)
        self.metrics.append(metrics)
        self.unwritten = True

    def write_metrics(self) -> None:
        """Write the newest row of metrics, with what callbacks have added to it, unless that was done.

        Raises:
            InputError: A callback has added something that is neither a number nor a word; the rest of the row is kept.
        """
        if not self.unwritten:
            return
        row = self.metrics.pop()
        found = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in row.items()}
        wrong = {name: value for name, value in found.items() if not isinstance(value, int | float | str | None)}
        row.clear()  # the same object, as callbacks may hold it
        row.update((name, value) for name, value in found.items() if name not in wrong)
        if self.folder is not None:
            self.folder.append("metrics", [row])
        self.unwritten = False
        self.metrics.append(row)  # last: a round with this row is complete and may be saved
        for name, value in wrong.items():
            raise InputError(f"a callback added {name!r} to the metrics: {shortened(value)}, which is not one number")

    def _is_better(self, metrics: Row) -> bool:
        lead, sign = self.setup.lead, -1 if self.setup.falls else 1
        value, best = metrics.get(lead), self.best.get(lead)
        if value is None or not math.isfinite(value):
            return False
        return best is None or sign * value > sign * best

    def save(self) -> None:
        """Write a checkpoint and the evaluated model; the row of its round comes first, if callbacks still have it."""
        self.write_metrics()
        folder, server = self.folder, self.server
        if folder is None:
            self.store.secure()
            return
        folder.save_weights("model", self.model.state_dict(), self.about)  # first: no checkpoint has an older model
        versions = self.store.flush()
        vectors = {"theta": server.theta, "buffers": server.buffers, "counters": server.counters}
        tensors = flatten({"server": vectors, "state": server.states})
        plain = {"round": server.round, "best": self.best, "stopped": self.stopped, "inputs": self.inputs}
        folder.save_checkpoint(Checkpoint(tensors, plain, versions, self.run))
        self.store.settle()

    @property
    def run(self) -> str:
        """Tells this run from others; see `identity`."""
        return identity(self.setup.experiment, self.inputs)

    @property
    def about(self) -> dict[str, str]:
        """The metadata of the model file: the run and the round."""
        return {"run": self.run, "round": str(self.server.round)}

    def restore(self, checkpoint: Checkpoint, before: Checkpoint | None = None) -> None:
        """Go back to a checkpoint. Nothing is deleted; `before` is the checkpoint before it, if there is one."""
        server, folder = self.server, self.folder
        assert folder is not None
        try:
            (vectors, states), plain = _split(checkpoint), checkpoint.plain
            theta, buffers, counters = (vectors[name] for name in ("theta", "buffers", "counters"))
            round, best, inputs, stopped = plain["round"], plain["best"], plain["inputs"], plain["stopped"]
        except KeyError as error:
            raise CheckpointError(f"the checkpoint in {folder.path} has no {error}; nothing was deleted") from None
        if theta.shape != server.theta.shape or buffers.shape != server.buffers.shape:
            raise CheckpointError(f"{folder.path} belongs to a model of another size; choose another folder")
        if checkpoint.run != identity(self.setup.experiment, inputs):
            raise CheckpointError(f"the checkpoint in {folder.path} is of another run; nothing was deleted")
        server.theta, server.buffers, server.counters = theta, buffers, counters
        server.states, server.round = states, round
        self.best, self.inputs, self.stopped = best, inputs, stopped
        self.store.restore(checkpoint.versions, before.versions if before else None)
        self.metrics = list(folder.rows("metrics", round))
        if [row["round"] for row in self.metrics] != list(range(1, round + 1)):
            path = folder.path / "metrics.jsonl"
            raise CheckpointError(f"{path} does not have all rows of rounds 1 to {round}; nothing was deleted")

    def adopt(self, earlier: RunState) -> None:
        """Take over the rounds of another run, which are rounds of this one as well, and write them to the folder."""
        server, theirs, folder, source = self.server, earlier.server, self.folder, earlier.folder
        assert folder is not None and source is not None
        server.theta, server.buffers, server.counters = (
            tensor.clone() for tensor in (theirs.theta, theirs.buffers, theirs.counters)
        )
        server.states, server.round, self.best = copied(theirs.states), theirs.round, dict(earlier.best)
        for client in earlier.store.versions:
            self.store.put(client, copied(earlier.store.get(client)))
        self.store.commit_round(server.round)
        for table in ("clients", "evaluations"):
            folder.append(table, source.rows(table, server.round))
        self.metrics = [dict(row) for row in earlier.metrics]
        folder.append("metrics", self.metrics)
        if self.best["round"]:
            best = read_tensors(source.path / "best.safetensors")
            folder.save_weights("best", best, {"run": self.run, "round": str(self.best["round"])})
        self.save()

    def clean(self, checkpoint: Checkpoint | None = None) -> None:
        """Remove what is newer than the restored checkpoint (None: than the start), which will be run again."""
        assert self.folder is not None
        self.folder.tables.cut(checkpoint.mark if checkpoint else None)
        self.folder.tidy(self.run)
        self.store.prune()
        if checkpoint and not self.folder.has_weights("model", self.about):
            self.folder.save_weights("model", self.model.state_dict(), self.about)


def _split(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's vectors, and its states as {part: {name: tensor}}."""
    parts: dict[str, dict[str, Any]] = nest(checkpoint.tensors)
    return parts.get("server", {}), nest(parts.get("state", {}))


@dataclass
class Tables:
    """A run of a model of the user's own without that model: what was measured, and nothing that needs weights.

    Attributes: See `RunState`.
    """

    folder: RunFolder
    experiment: Experiment
    plain: dict[str, Any]
    failure: str = ""
    last_clients: list[Row] = field(default_factory=list)
    last_evaluations: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round: int = self.plain["round"]
        self.best, self.inputs, self.stopped = self.plain["best"], self.plain["inputs"], self.plain.get("stopped", "")
        self.metrics = list(self.folder.rows("metrics", self.round))
        self.finished = self.round >= self.experiment.rounds

    def _missing(self) -> CheckpointError:
        return CheckpointError(
            f"{self.folder.path} was run with a model of your own ({self.experiment.model}), which the folder does not "
            "hold; for its weights pass it: load_run(path, model=that_module)"
        )

    def record(self, metrics: Row, clients: Sequence[Row], evaluations: list[Row]) -> None:
        """Only a whole run goes on."""
        raise self._missing()

    def write_metrics(self) -> None:
        """Only a whole run goes on."""
        raise self._missing()

    def save(self) -> None:
        """Only a whole run goes on."""
        raise self._missing()

    @property
    def setup(self) -> Setup:
        """There is none."""
        raise self._missing()

    @property
    def server(self) -> Server:
        """There is none."""
        raise self._missing()

    @property
    def store(self) -> ClientStore:
        """There is none."""
        raise self._missing()

    @property
    def model(self) -> nn.Module:
        """There is none."""
        raise self._missing()


def load_state(path: str | Path, model: nn.Module | None = None) -> RunState | Tables:
    """Load a run from its folder, finished or not, without its data."""
    folder = RunFolder(path)
    experiment, checkpoint = folder.experiment(), folder.load_checkpoint()
    if checkpoint is None:
        raise CheckpointError(
            f"{path} has no checkpoint yet; let the run continue, or start it again with the same command"
        )
    inputs = checkpoint.plain["inputs"]
    if model is None and inputs["custom_model"]:
        return Tables(folder, experiment, checkpoint.plain)
    absent = _Absent(inputs["clients"])
    task = TASKS.get(inputs["task"]["name"], Classification())
    placeholder = Federation(absent, sizes=absent, classes=inputs["classes"], task=task)
    try:
        setup = assemble(experiment, placeholder, model, shape=inputs["shape"] and tuple(inputs["shape"]), load=False)
    except UnknownNameError as error:
        remedy = "a part of your own must be known first: import its module (on the command line: --import MODULE)"
        raise CheckpointError(f"{path}: {error}; {remedy}") from None
    store = ClientStore(folder.path / "clients", run=checkpoint.run)
    state = RunState(setup, fresh_server(setup), store, folder)
    state.restore(checkpoint)
    return state


class _Absent(Sequence[Any]):
    """Stands for the data of `count` clients, which are not available."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise CheckpointError("a run loaded from its folder has no training data")
