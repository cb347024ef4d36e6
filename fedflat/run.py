"""`run`: from an experiment to its result, resumable at any point. `Run`: that result."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import calls, streams
from fedflat.backends import Backend, make_backend
from fedflat.callbacks import Callback
from fedflat.client import Criterion, Task
from fedflat.data import DATASETS, PARTITIONS, Federation, load_federation
from fedflat.errors import CheckpointError, FedflatError, InputError, InterruptedRunError, UnknownNameError
from fedflat.experiment import Experiment
from fedflat.flat import FlatModel
from fedflat.method import Method, Part, Server, State
from fedflat.models import MODELS, build_model
from fedflat.participation import LAWS, Participants, checked
from fedflat.participation import participants as participants_by
from fedflat.parts.evaluated import AllClients, Selected
from fedflat.server import RoundLoop, Row, evaluated_weights, fresh_server
from fedflat.store import MEMORY, Checkpoint, ClientStore, RunFolder, describe_environment, flatten, nest

log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 10.0


class Run:
    """A run, finished or under way.

    experiment: what was run. metrics: one dict a round. out: its folder, if it has one.
    server_weights: the vector that would be sent next. weights: the vector that is evaluated.
    """

    def __init__(self, task: Task, server: Server, store: ClientStore, folder: RunFolder | None) -> None:
        self.experiment, self._task, self._server = task.experiment, task, server
        self._store, self._folder = store, folder
        self.metrics: list[Row] = []
        self._clients: list[Row] = []
        self.best: dict[str, Any] = {"round": 0, "accuracy": -1.0}
        self._inputs: dict[str, Any] = {}

    @property
    def out(self) -> Path | None:
        """The run folder."""
        return self._folder.path if self._folder else None

    @property
    def clients(self) -> list[Row]:
        """One dict per round and client that took part: samples, steps, loss, norm of its update, seconds."""
        return self._folder.rows("clients", self._server.round) if self._folder else self._clients

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
        """A module with the evaluated weights, in evaluation mode."""
        return self._export(self.weights)

    @property
    def server_state(self) -> dict[str, State]:
        """{part: {name: tensor}} that the method keeps on the server."""
        return _copied(self._server.states)

    def client_state(self, client: int) -> dict[str, State]:
        """{part: {name: tensor}} that the method keeps for a client; empty for one that never took part."""
        self._check_client(client)
        return _copied(self._store.get(client))

    def personal(self, client: int) -> nn.Module:
        """Client `client`'s own model, for the methods that keep one."""
        self._check_client(client)
        states, method = self._store.get(client), self._task.method
        for part in method.filling("personal"):
            theta = part.personal(states.get(part.name, {}), self._server.theta)
            if theta is not None:
                return self._export(theta)
        raise InputError(f"the method {str(method)!r} keeps no personal model for client {client}")

    def _export(self, theta: Tensor) -> nn.Module:
        return self._task.model.export(theta, self._server.buffers, self._server.counters)

    def _check_client(self, client: int) -> None:
        if not 0 <= client < self._server.clients:
            raise InputError(f"there is no client {client}: the run has clients 0 to {self._server.clients - 1}")

    def __repr__(self) -> str:
        done = f"{len(self.metrics)} of {self.experiment.rounds} rounds"
        last = self.metrics[-1]["accuracy"] if self.metrics else None
        return f"<Run {self.experiment.method!r}: {done}" + (f", accuracy {last:.4f}>" if last is not None else ">")


def run(
    experiment: Experiment,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    participants: Participants | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    state_memory: int = MEMORY,
) -> Run:
    """Run an experiment, or go on with it where its folder left off.

    federation, model, loss: your own data, network and loss instead of the experiment's `data`, `model` and
        cross-entropy. The loss takes (output, y) and returns a mean over the batch. participants: from t = 0, 1, … to
        the clients that train, instead of `participation`.
    out: folder for everything the run writes; None keeps it in memory. root: where data sets lie.
    progress: a live line in the terminal; None shows it where there is a terminal.
    callbacks: see `Callback`. state_memory: bytes of client state to hold in memory before it goes to disk.
    """
    with _single_thread():
        task = make_task(experiment, federation=federation, model=model, loss=loss, root=root)
        choose = _chooser(task, participants)
        folder = RunFolder(out) if out is not None else None
        try:
            result = _open(task, folder, custom_model=model is not None, memory=state_memory)
            if len(result.metrics) < experiment.rounds:
                shown = sys.stderr.isatty() if progress is None else progress
                _go_on(result, choose, [*callbacks, *(_display() if shown else [])])
        finally:
            if folder:
                folder.unlock()
    return result


def _display() -> list[Callback]:
    from fedflat.report.progress import Progress  # rich is imported only where something is shown

    return [Progress()]


def load_run(path: str | Path, model: nn.Module | None = None) -> Run:
    """A run from its folder, finished or not. model: the module it was made with, if that was your own."""
    folder = RunFolder(path)
    experiment, checkpoint = folder.experiment(), folder.load_checkpoint()
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint yet: the run was stopped before its first one")
    inputs = checkpoint.plain["inputs"]
    if model is None and inputs["custom_model"]:
        raise CheckpointError(f"{path} was run with a model of your own: load_run(path, model=that_module)")
    placeholder = Federation(_Nobody(inputs["clients"]), sizes=_Nobody(inputs["clients"]), classes=inputs["classes"])
    task = _assemble(experiment, placeholder, model, None, tuple(inputs["shape"]))
    result = Run(task, fresh_server(task), ClientStore(folder.path / "clients"), folder)
    _restore(result, checkpoint)
    return result


class _Nobody(Sequence[Any]):
    """So many clients of which nothing is known but the number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise CheckpointError("a run loaded from its folder has no training data")


# ---- putting the pieces together ----


def make_task(
    experiment: Experiment,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    root: str | Path | None = None,
) -> Task:
    """Data, model and method of an experiment, checked against each other."""
    e = experiment
    _check_spelling(e, own_data=federation is not None, own_model=model is not None)
    if federation is None:
        federation = load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)
    task = _assemble(e, federation, model, loss, None)
    federation.check(_outputs(task) if loss is None else None)
    for part in task.method.filling("check"):
        part.check(e, task.model)
    _check_server_lr(task)
    if e.weighting == "samples" and task.method.uniform:
        log.warning("%s: its invariants need plain means over clients; weighting='samples' breaks them", task.method)
    return task


def _check_spelling(e: Experiment, own_data: bool, own_model: bool) -> None:
    """Tell a wrong name before data are read."""
    Method.parse(e.method)
    named: list[tuple[str, str, Collection[str]]] = [("participation", e.participation, LAWS)]
    named += [] if own_data else [("data set", e.data, DATASETS), ("partition", e.partition, PARTITIONS)]
    named += [] if own_model else [("model", e.model, MODELS)]
    for kind, text, known in named:
        name = calls.parse(text).name
        if name not in known:
            raise UnknownNameError(kind, name, known)


def _assemble(
    e: Experiment,
    federation: Federation,
    model: nn.Module | None,
    loss: Criterion | None,
    shape: tuple[int, ...] | None,
) -> Task:
    method, evaluator = _evaluation(Method.parse(e.method), e.evaluated)
    with streams.isolated(e.seed, "init"):
        module = model or build_model(e.model, shape or federation.input_shape, federation.classes)
    dtype = getattr(torch, e.dtype)
    flat = FlatModel(module, dtype, head=e.head, features=e.features, last_stage=e.last_stage)
    uniform = method.uniform if e.weighting == "auto" else e.weighting == "uniform"
    task = Task(e, method, flat, federation, loss or F.cross_entropy, uniform, evaluator)
    for part in method.filling("prepare"):
        part.prepare(flat)
    return task


def _evaluation(method: Method, evaluated: str) -> tuple[Method, Part | None]:
    """The method with the bookkeeping that the evaluated weights need, and the part that makes them."""
    offered = method.filling("averaged")
    if evaluated == "server" or (evaluated == "auto" and not offered):
        return method, None
    if evaluated in ("auto", "averaged"):
        if not offered:
            raise InputError(f"evaluated='averaged': no part of {str(method)!r} makes an average; add swa, for one")
        return method, offered[0]
    part: Part = Selected() if evaluated == "selected" else AllClients()
    return method + part, part


def _outputs(task: Task) -> int | None:
    """How many classes the model tells apart, by trying it on one sample."""
    samples = task.federation.samples(0)
    if len(samples) == 0:
        return None
    x, _ = samples.batch(torch.zeros(1, dtype=torch.int64))
    task.model.module.eval()
    try:
        with torch.no_grad(), streams.isolated(task.experiment.seed, "trial"):
            output = task.model(task.federation.preprocess(x, None, task.model.theta.dtype))
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"the model does not take the data: {error}") from error
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise InputError("the model must return one row of class scores a sample; for other outputs give loss=…")
    return int(output.shape[1])


def _check_server_lr(task: Task) -> None:
    owner = task.method.owner("step")
    if owner.own_step and task.experiment.server_lr != 1.0:
        raise InputError(f"{owner.name} defines its own server step ({owner.own_step}): leave server_lr at 1")


def _chooser(task: Task, own: Participants | None) -> Callable[[int], list[int]]:
    clients, e = len(task.federation), task.experiment
    return checked(own or participants_by(e.participation, clients, e.seed), clients)


# ---- opening, saving, resuming ----


def _open(task: Task, folder: RunFolder | None, custom_model: bool, memory: int) -> Run:
    server = fresh_server(task)
    if folder is None:
        return Run(task, server, ClientStore(None, memory), None)
    folder.lock()
    result = Run(task, server, ClientStore(folder.path / "clients", memory), folder)
    result._inputs = _inputs(task, server, custom_model)
    if not folder.exists():
        folder.create(task.experiment, describe_environment() | {"inputs": result._inputs})
        return result
    differences = task.experiment.differences(folder.experiment())
    if differences:
        raise CheckpointError(
            f"{folder.path} holds another experiment ({'; '.join(differences)}); choose another folder"
        )
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        folder.rewind(0)
        result._store.restore({})
        return result
    changed = [k for k, v in result._inputs.items() if checkpoint.plain["inputs"].get(k) != v]
    if changed:
        raise CheckpointError(f"{folder.path} was run with other data or another model (differs: {', '.join(changed)})")
    _restore(result, checkpoint)
    folder.rewind(server.round)
    log.info("%s: going on after round %d", folder.path, server.round)
    return result


def _inputs(task: Task, server: Server, custom_model: bool) -> dict[str, Any]:
    names = "".join(f"{span.name}{span.shape}" for span in task.model.spans).encode()
    weights = server.theta.numpy().tobytes()
    return {
        "data": task.federation.fingerprint(),
        "model": hashlib.sha256(names + weights).hexdigest()[:16],
        "custom_model": custom_model,
        "clients": len(task.federation),
        "classes": task.federation.classes,
        "shape": list(task.federation.input_shape),
    }


def _restore(result: Run, checkpoint: Checkpoint) -> None:
    server, tensors = result._server, checkpoint.tensors
    if tensors["server/theta"].shape != server.theta.shape:
        raise CheckpointError(f"{result.out} belongs to a model of another size")
    server.theta, server.buffers = tensors.pop("server/theta"), tensors.pop("server/buffers")
    server.counters = tensors.pop("server/counters")
    server.states = nest({key.removeprefix("state/"): t for key, t in tensors.items()})
    server.round = checkpoint.plain["round"]
    result.best, result._inputs = checkpoint.plain["best"], checkpoint.plain["inputs"]
    result._store.restore(checkpoint.versions)
    assert result._folder is not None
    result.metrics = result._folder.rows("metrics", server.round)


def _save(result: Run) -> None:
    folder, server = result._folder, result._server
    if folder is None:
        return
    versions = result._store.flush()
    tensors = {
        "server/theta": server.theta,
        "server/buffers": server.buffers,
        "server/counters": server.counters,
    }
    tensors |= {f"state/{key}": t for key, t in flatten(server.states).items()}
    plain = {"round": server.round, "best": result.best, "inputs": result._inputs}
    folder.save_checkpoint(Checkpoint(tensors, plain, versions))
    result._store.settle()
    folder.save_weights("model", result.model.state_dict(), {"round": str(server.round)})


# ---- going through the rounds ----


def _go_on(result: Run, choose: Callable[[int], list[int]], callbacks: Sequence[Callback]) -> None:
    task = result._task
    backend: Backend = make_backend(task)
    loop = RoundLoop(task, result._server, backend, result._store, choose)
    saved, stop = time.monotonic(), False
    for callback in callbacks:
        callback.start(result)
    try:
        with _interruptible() as loop.safe:
            while result._server.round < task.experiment.rounds and not stop:
                metrics = loop.run_round()
                _record(result, metrics, loop.rows)
                wishes = [callback.round(result, metrics) for callback in callbacks]
                stop = any(wishes)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    _save(result)
                    saved = time.monotonic()
        _save(result)
    except KeyboardInterrupt:
        _save(result)
        where = f"; run the same command again to go on from {result.out}" if result.out else ""
        raise InterruptedRunError(f"interrupted after round {result._server.round}{where}") from None
    except FedflatError:
        if result._server.round:
            _save(result)
        raise
    finally:
        backend.close()
        for callback in callbacks:
            callback.end(result)


def _record(result: Run, metrics: Row, rows: list[Row]) -> None:
    result.metrics.append(metrics)
    better = metrics["accuracy"] is not None and metrics["accuracy"] > result.best["accuracy"]
    if better:
        result.best = {"round": metrics["round"], "accuracy": metrics["accuracy"]}
    if result._folder is None:
        result._clients += rows
        return
    result._folder.append("metrics", [metrics])
    result._folder.append("clients", rows)
    if better:
        result._folder.save_weights("best", result.model.state_dict(), {"round": str(metrics["round"])})


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Sums of many numbers depend on how many threads share them; one everywhere gives one result everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Safe = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _interruptible() -> Iterator[Safe]:
    """Hold Ctrl-C and SIGTERM back until the server is in one piece: they act only inside `with safe():`."""
    waiting = inside = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if inside:
            raise KeyboardInterrupt
        waiting = True

    @contextlib.contextmanager
    def safe() -> Iterator[None]:
        nonlocal inside
        if waiting:
            raise KeyboardInterrupt
        inside = True
        try:
            yield
        finally:
            inside = False

    if threading.current_thread() is not threading.main_thread():
        yield safe  # signals are the main thread's business
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield safe
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _copied(states: dict[str, State]) -> dict[str, State]:
    return {part: {name: t.clone() for name, t in state.items()} for part, state in states.items()}
