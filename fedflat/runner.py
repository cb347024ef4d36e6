"""`run`: from an experiment to its result, resumable at any point."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat import streams
from fedflat.assembly import describe_inputs, make_task
from fedflat.backends import Backend, make_backend
from fedflat.callbacks import Callback
from fedflat.client import Criterion, Task
from fedflat.data import Federation
from fedflat.errors import CheckpointError, FedflatError, InputError, InterruptedRunError
from fedflat.experiment import Experiment
from fedflat.folder import RunFolder, describe_environment
from fedflat.participation import Participants, checked
from fedflat.participation import participants as participants_by
from fedflat.result import Run, restore, save
from fedflat.server import RoundLoop, Row, fresh_server
from fedflat.signals import interruptible
from fedflat.store import MEMORY, ClientStore

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
) -> Run:
    """Run an experiment, or go on with it where its folder left off.

    federation, model, loss: your own data, network and loss instead of the experiment's `data`, `model` and
        cross-entropy. The loss takes (output, y) and returns a mean over the batch. participants: from t = 0, 1, … to
        the clients that train, instead of `participation`.
    out: folder for everything the run writes; None keeps it in memory. root: where data sets lie.
    progress: a live line in the terminal; None shows it where there is a terminal.
    callbacks: see `Callback`. state_memory: bytes of client state to hold in memory before it goes to disk.
    watch: what else to record, in every round that `watch_every` divides: "drift", "gsnr", "client_curvature",
        "feature_norms", "interference". It changes no result.
    """
    with _single_thread(), streams.isolated(experiment.seed, "run"):
        task = make_task(
            experiment,
            federation=federation,
            model=model,
            loss=loss,
            root=root,
            watch=watch,
            watch_every=watch_every,
        )
        choose = _chooser(task, participants)
        folder = RunFolder(out) if out is not None else None
        try:
            inputs = describe_inputs(task, model is not None, participants) if folder else {}
            result = _open(task, folder, inputs, memory=state_memory)
            if result._server.round < experiment.rounds:
                shown = sys.stderr.isatty() if progress is None else progress
                _go_on(result, choose, [*callbacks, *(_display() if shown else [])])
        finally:
            if folder:
                folder.unlock()
    return result


def _display() -> list[Callback]:
    from fedflat.report.progress import Progress  # rich is imported only where something is shown

    return [Progress()]


def _chooser(task: Task, own: Participants | None) -> Callable[[int], list[int]]:
    clients, e = task.clients, task.experiment
    if own is not None and not callable(own):
        raise InputError("participants= takes a function of the round, such as lambda t: [0, 3]")
    law = participants_by(e.participation, clients, e.seed) if own is None else own
    return checked(law, clients)


def _open(task: Task, folder: RunFolder | None, inputs: dict[str, Any], memory: int) -> Run:
    server = fresh_server(task)
    if folder is None:
        return Run(task, server, ClientStore(None, memory), None)
    folder.lock()
    folder.tidy()
    result = Run(task, server, ClientStore(folder.path / "clients", memory), folder)
    result._inputs = inputs
    if not folder.exists():
        folder.create(task.experiment, describe_environment() | {"inputs": result._inputs})
        return result
    checkpoint = folder.load_checkpoint()
    differences = task.experiment.differences(folder.experiment())
    if differences and checkpoint is None and not folder.rows("metrics", 1):
        folder.record(task.experiment, describe_environment() | {"inputs": inputs})  # nothing was ever run here
    elif differences:
        raise CheckpointError(
            f"{folder.path} holds another experiment ({'; '.join(differences)}); choose another folder"
        )
    if checkpoint is None:
        folder.rewind(0)
        result._store.restore({}, prune=True)
        return result
    changed = [k for k, v in result._inputs.items() if checkpoint.plain["inputs"].get(k) != v]
    if changed:
        raise CheckpointError(f"{folder.path} was run with other data or another model (differs: {', '.join(changed)})")
    restore(result, checkpoint, prune=True)
    folder.rewind(server.round)
    log.info("%s: going on after round %d", folder.path, server.round)
    return result


def _go_on(result: Run, choose: Callable[[int], list[int]], callbacks: Sequence[Callback]) -> None:
    task = result._task
    backend: Backend = make_backend(task)
    loop = RoundLoop(task, result._server, backend, result._store, choose)
    saved, stop = time.monotonic(), False
    started: list[Callback] = []
    try:
        for callback in callbacks:
            callback.start(result)
            started.append(callback)
        with interruptible() as loop.safe:
            while result._server.round < task.experiment.rounds and not stop:
                metrics = loop.run_round()
                _record(result, metrics, loop.rows, loop.examined)
                wishes = [callback.round(result, metrics) for callback in callbacks]
                stop = any(wishes)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    save(result)
                    saved = time.monotonic()
        save(result)
    except KeyboardInterrupt:
        _save_whole(result)
        where = f"; run the same command again to go on from {result.out}" if result.out else ""
        raise InterruptedRunError(f"interrupted after round {result._server.round}{where}") from None
    except FedflatError:
        _save_whole(result)
        raise
    finally:
        backend.close()
        for callback in started:
            callback.end(result)


def _save_whole(result: Run) -> None:
    """Save, unless a round failed half-way: that one is run again from the last checkpoint."""
    if 0 < result._server.round == len(result.metrics):
        save(result)


def _record(result: Run, metrics: Row, rows: list[Row], examined: list[Row]) -> None:
    result.metrics.append(metrics)
    better = metrics["accuracy"] is not None and metrics["accuracy"] > result.best["accuracy"]
    if better:
        result.best = {"round": metrics["round"], "accuracy": metrics["accuracy"]}
    if result._folder is None:
        result._clients += rows
        result._evaluations += examined
        return
    result._folder.append("metrics", [metrics])
    result._folder.append("clients", rows)
    result._folder.append("evaluations", examined)
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
