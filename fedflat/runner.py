"""`run`: from an experiment to its result, resumable at any point."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat import streams
from fedflat.assembly import describe_inputs, make_task
from fedflat.backends import Backend, make_backend
from fedflat.callbacks import Callback, Stop
from fedflat.data import Federation
from fedflat.data.picture import partition_record
from fedflat.errors import CheckpointError, InputError, InterruptedRunError
from fedflat.experiment import Experiment
from fedflat.folder import RunFolder, describe_environment
from fedflat.participation import Participants, checked
from fedflat.participation import participants as participants_by
from fedflat.presets import load_preset
from fedflat.result import Run, restore, save
from fedflat.server import RoundLoop, Row, fresh_server
from fedflat.signals import interruptible
from fedflat.store import MEMORY, ClientStore
from fedflat.task import Criterion, Task

log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 10.0


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
    watch: Sequence[str] = (),
    watch_every: int = 1,
    ray_address: str | None = None,
    engine: Callable[[Task], Backend] | None = None,
    preset: str = "",
) -> Run:
    """Run an experiment, or go on with it where its folder left off.

    federation, model, loss: your own data, network and loss instead of the experiment's `data`, `model` and
        cross-entropy. The loss takes (output, y) and returns a mean over the batch. participants: from t = 0, 1, … to
        the clients that train, instead of `participation`.
    out: folder for everything the run writes; None keeps it in memory. root: where data sets lie.
    progress: a live line in the terminal; None shows it where there is a terminal.
    callbacks: see `Callback`. state_memory: bytes of client state to hold in memory, here or in the cluster, before it
        goes to disk.
    watch: what else to record, in every round that `watch_every` divides: "drift", "gsnr", "client_curvature",
        "feature_norms", "interference". It changes no result.
    ray_address: with backend="ray", "host:port" of a cluster that this machine belongs to, "auto" to find it, "local"
        to start one for this run; None is $RAY_ADDRESS, else "local".
    engine: makes the back end that the clients are run on, instead of the one that `Experiment.backend` names.
    preset: name of the preset that the experiment was made from, for the record in the run folder.
    """
    if not isinstance(experiment, Experiment):
        raise InputError(f"run takes an Experiment, not {type(experiment).__name__}: write Experiment(data=…, …)")
    _check_callbacks(callbacks)
    facts: dict[str, Any] = {"preset": load_preset(preset).record(experiment)} if preset else {}
    with single_thread(), streams.isolated(experiment.seed, "run"):
        task = make_task(
            experiment,
            federation=federation,
            model=model,
            loss=loss,
            root=root,
            watch=watch,
            watch_every=watch_every,
            sampled=participants is None,
        )
        choose = _chooser(task, participants)
        folder = RunFolder(out) if out is not None else None
        try:
            facts["inputs"] = describe_inputs(task, model is not None, participants) if folder else {}
            result = _open(task, folder, facts, memory=state_memory)
            if result._server.round < experiment.rounds:
                shown = sys.stderr.isatty() if progress is None else progress
                hired = engine or partial(make_backend, ray_address=ray_address)
                _go_on(result, choose, [*callbacks, *(_display() if shown else [])], hired)
        finally:
            if folder:
                folder.unlock()
    return result


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InputError(f"callbacks= takes a list of objects such as fedflat.EarlyStopping(), not {callback!r}")


def _display() -> list[Callback]:
    from fedflat.report.progress import Progress  # rich is imported only where something is shown

    return [Progress()]


def _chooser(task: Task, own: Participants | None) -> Callable[[int], list[int]]:
    clients, e = task.clients, task.experiment
    if own is not None and not callable(own):
        raise InputError("participants= takes a function of the round, such as lambda t: [0, 3]")
    law = participants_by(e.participation, clients, e.seed) if own is None else own
    return checked(law, clients)


def _open(task: Task, folder: RunFolder | None, facts: dict[str, Any], memory: int) -> Run:
    server = fresh_server(task)
    if folder is None:
        return Run(task, server, ClientStore(None, memory), None)
    folder.lock()
    result = Run(task, server, ClientStore(folder.path / "clients", memory), folder)
    result._inputs = facts["inputs"]
    if not folder.exists():
        folder.create(task.experiment, *_origin(task, facts))
        return result
    folder.tidy()
    checkpoint = folder.load_checkpoint()
    differences = task.experiment.differences(folder.experiment())
    if differences and (checkpoint is not None or folder.rows("metrics", 1)):
        raise CheckpointError(
            f"{folder.path} holds another experiment ({'; '.join(differences)}); choose another folder"
        )
    if checkpoint is None:  # what was begun here begins anew, perhaps with other data
        folder.record(task.experiment, *_origin(task, facts))
        folder.rewind(0)
        result._store.restore({}, prune=True)
        return result
    changed = [k for k, v in result._inputs.items() if checkpoint.plain["inputs"].get(k) != v]
    if changed:
        remedy = "call torch.manual_seed before you make the model" if "model" in changed else "give it the same data"
        raise CheckpointError(
            f"{folder.path} was run with other data or another model (differs: {', '.join(changed)}); {remedy}, or "
            "choose another folder"
        )
    restore(result, checkpoint, prune=True)
    folder.rewind(server.round)
    log.info("%s: going on after round %d", folder.path, server.round)
    return result


def _origin(task: Task, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run is made on and of: versions, preset and inputs, and who holds what."""
    return describe_environment() | facts, partition_record(task.federation)


def _go_on(
    result: Run, choose: Callable[[int], list[int]], callbacks: Sequence[Callback], engine: Callable[[Task], Backend]
) -> None:
    task = result._task
    with contextlib.ExitStack() as endings:
        backend = engine(task)  # before a callback starts threads, which no fork survives
        endings.callback(backend.close)
        loop = RoundLoop(task, result._server, backend, result._store, choose)
        try:
            _start(result, callbacks, endings)
            with interruptible() as loop.safe:
                _rounds(result, loop, callbacks)
            save(result)
        except KeyboardInterrupt:
            result._failure = "interrupted"
            _save_whole(result)
            left = result.out and result._server.round < result.experiment.rounds
            where = f"; run the same command again to go on from {result.out}" if left else ""
            raise InterruptedRunError(f"interrupted after round {result._server.round}{where}") from None
        except Exception:
            result._failure = "failed"
            _save_whole(result)
            raise


def _start(result: Run, callbacks: Sequence[Callback], endings: contextlib.ExitStack) -> None:
    answers: list[Stop] = []
    for callback in callbacks:
        answers.append(callback.start(result))
        endings.callback(callback.end, result)
    result.stopped = _why(callbacks, answers)


def _rounds(result: Run, loop: RoundLoop, callbacks: Sequence[Callback]) -> None:
    saved = time.monotonic()
    while result._server.round < result.experiment.rounds and not result.stopped:
        metrics = loop.run_round()
        _record(result, metrics, loop.rows, loop.examined)
        result.stopped = _why(callbacks, [callback.round(result, metrics) for callback in callbacks])
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save(result)
            saved = time.monotonic()


def _why(callbacks: Sequence[Callback], answers: Sequence[Stop]) -> str:
    """Why to stop here, in the words of the first callback that wants to; empty where none does."""
    for callback, answer in zip(callbacks, answers, strict=True):
        if answer:
            return answer if isinstance(answer, str) else f"{type(callback).__name__} asked for it"
    return ""


def _save_whole(result: Run) -> None:
    """Save, unless a round failed half-way: that one is run again from the last checkpoint."""
    if 0 < result._server.round == len(result.metrics):
        save(result)


def _record(result: Run, metrics: Row, rows: list[Row], examined: list[Row]) -> None:
    result.last_clients, result.last_evaluations = rows, examined
    better = metrics["accuracy"] is not None and metrics["accuracy"] > result.best["accuracy"]
    if better:
        result.best = {"round": metrics["round"], "accuracy": metrics["accuracy"]}
    if result._folder is None:
        result._clients += rows
        result._evaluations += examined
    else:
        result._folder.append("metrics", [metrics])
        result._folder.append("clients", rows)
        result._folder.append("evaluations", examined)
        if better:
            result._folder.save_weights("best", result.model.state_dict(), {"round": str(metrics["round"])})
    result.metrics.append(metrics)  # last: a round that is in here is recorded whole and may be saved


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Sums of many numbers depend on how many threads share them; one everywhere gives one result everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
