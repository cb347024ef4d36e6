"""`run`: runs an experiment, or continues it from its run folder."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedflat.console import in_notebook
from fedflat.core import streams
from fedflat.core.participation import Participants, checked
from fedflat.core.participation import participants as participants_by
from fedflat.core.processes import single_thread
from fedflat.data import Federation
from fedflat.data.picture import partition_record
from fedflat.engine.assembly import describe_inputs, make_setup
from fedflat.engine.backends import Backend, make_backend
from fedflat.engine.pictures import pictures
from fedflat.engine.round_loop import RoundLoop
from fedflat.engine.setup import Criterion, Setup, fresh_server
from fedflat.engine.stacking import prepare as prepare_stack
from fedflat.errors import CheckpointError, FolderInUseError, InputError, InterruptedRunError
from fedflat.experiment import Experiment
from fedflat.presets import load_preset
from fedflat.runs.callbacks import Callback, Stop
from fedflat.runs.checkpoint import NEWEST, PREVIOUS, Checkpoint, identity
from fedflat.runs.folder import RunFolder, describe_environment
from fedflat.runs.result import Run
from fedflat.runs.signals import interruptible
from fedflat.runs.state import RunState, Tables
from fedflat.runs.store import MEMORY, ClientStore
from fedflat.tasks.metrics import Wanted

log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 10.0


def run(
    experiment: Experiment,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    metrics: Wanted = (),
    participants: Participants | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    state_memory: int = MEMORY,
    watch: Sequence[str] = (),
    watch_every: int = 1,
    ray_address: str | None = None,
    engine: Callable[[Setup], Backend] | None = None,
    preset: str = "",
) -> Run:
    """Run an experiment. If its folder has a checkpoint, continue from there.

    Args:
        experiment: What to run.
        federation: Your own data, instead of the experiment's `data`.
        model: Your own network, instead of the experiment's `model`.
        loss: Your own loss, instead of the experiment's `loss`: takes (output, y), returns a mean over the batch.
        metrics: What to measure besides the task's metrics: names, or {name: function}; see `tasks.metrics_of`.
        participants: Names the clients that train: a function of t = 0, 1, …, or of t and their last losses.
        out: Folder for all files of the run; None keeps the run in memory.
        root: The folder of the data sets.
        progress: Whether to show a progress bar; None shows it in a terminal and in a notebook.
        callbacks: See `Callback`.
        state_memory: Bytes of client state to keep in memory, here or in the cluster; the rest is kept on disk.
        watch: What else to record, without effect on results: "drift", "gsnr", "client_curvature", "feature_norms" …
        watch_every: Record it in every round that this number divides.
        ray_address: With backend="ray": "host:port" of a cluster, "auto" or "local"; None is $RAY_ADDRESS or "local".
        engine: Makes the back end that runs the clients, instead of the one that `Experiment.backend` names.
        preset: The name of the preset that the experiment was made from; recorded in the run folder.

    Raises:
        InputError: Something you gave cannot be used.
        CheckpointError: The folder belongs to another run, is damaged, or is in use.
        RunError: The run failed after it had started.
        InterruptedRunError: Ctrl-C or SIGTERM stopped the run after it had written a checkpoint.
    """
    _check_types(experiment, callbacks)
    recorded = _note(experiment, preset)
    own: dict[str, Any] = {"federation": federation, "model": model, "loss": loss}
    seen: dict[str, Any] = {"metrics": metrics, "root": root, "sampled": participants is None}
    seen |= {"watch": watch, "watch_every": watch_every}
    shown = sys.stderr.isatty() or in_notebook() if progress is None else progress
    make = engine or partial(make_backend, ray_address=ray_address)
    with single_thread(), streams.isolated(experiment.seed, "run"):
        setup = make_setup(experiment, **own, **seen)
        choose = _chooser(setup, participants)
        _choose_stack(setup, choose, engine, out)
        recorded["inputs"] = describe_inputs(setup, own, participants) if out is not None else {}
        with _opened(setup, out, recorded, state_memory) as state:
            if not state.finished:
                _go_on(state, choose, [*callbacks, *(_display() if shown else [])], make)
    return Run(state)


def begin(experiment: Experiment, earlier: RunState | Tables, out: str | Path, preset: str = "", **seen: Any) -> None:
    """Make a run folder in which the rounds of an earlier run are done, for `run` to go on from.

    They must be rounds of this experiment, bit for bit; see `runs.branching.common_rounds`. If the folder already has
    a checkpoint, or another process uses it, nothing happens.

    Args:
        experiment: The experiment of the new run.
        earlier: The run whose rounds are copied.
        out: The new run folder.
        preset: As for `run`.
        **seen: As for `run`: `metrics`, `root`, `watch` and `watch_every`.
    """
    with single_thread(), streams.isolated(experiment.seed, "run"), contextlib.suppress(FolderInUseError):
        setup = make_setup(experiment, **seen)
        _choose_stack(setup, _chooser(setup, None), None, out)
        recorded = _note(experiment, preset) | {"inputs": describe_inputs(setup, {})}
        with _opened(setup, out, recorded, MEMORY) as state:
            if not state.round and isinstance(earlier, RunState):
                state.adopt(earlier)


def _note(experiment: Experiment, preset: str) -> dict[str, Any]:
    """What a run folder tells of the preset, if there is one."""
    return {"preset": load_preset(preset).record(experiment)} if preset else {}


def _choose_stack(setup: Setup, choose: Callable[..., list[int]], engine: object, out: str | Path | None) -> None:
    wanted = setup.experiment.stack
    if engine is None:  # another engine may have its clients elsewhere
        prepare_stack(setup, choose, _picked(out) if wanted == "auto" else None)
        if setup.stack > 1:
            setup.federation.pool()
    elif wanted != 1:
        log.warning("stack=%s: this engine's clients train one by one", wanted)


def _picked(out: str | Path | None) -> int | None:
    """What stack="auto" picked when the run in this folder began; None if there is none."""
    folder = RunFolder(out) if out is not None else None
    for name in (NEWEST, PREVIOUS) if folder is not None and folder.exists() else ():
        with contextlib.suppress(CheckpointError):  # a damaged one is told of when the run is opened
            checkpoint = folder.load_checkpoint(name) if folder is not None else None
            if checkpoint is not None:
                picked: int | None = checkpoint.plain.get("inputs", {}).get("stack")
                return picked
    return None


def _check_types(experiment: Experiment, callbacks: Sequence[Callback]) -> None:
    if not isinstance(experiment, Experiment):
        raise InputError(f"run takes an Experiment, not {type(experiment).__name__}: write Experiment(data=…, …)")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InputError(f"callbacks= takes a list of objects such as fedflat.EarlyStopping(), not {callback!r}")


def _display() -> list[Callback]:
    from fedflat.runs.display import NotebookBar, Progress  # only if something is shown, as rich is slow to import

    return [NotebookBar() if in_notebook() else Progress()]


def _chooser(setup: Setup, own: Participants | None) -> Callable[..., list[int]]:
    clients, e = setup.clients, setup.experiment
    if own is not None and not callable(own):
        raise InputError("participants= takes a function of the round t = 0, 1, …, such as lambda t: [0, 3]")
    law = participants_by(e.participation, clients, e.seed) if own is None else own
    return checked(law, clients)


@contextlib.contextmanager
def _opened(setup: Setup, out: str | Path | None, environment: dict[str, Any], memory: int) -> Iterator[RunState]:
    folder = RunFolder(out) if out is not None else None
    try:
        yield _open(setup, folder, environment, memory)
    finally:
        if folder:
            folder.unlock()


def _open(setup: Setup, folder: RunFolder | None, environment: dict[str, Any], memory: int) -> RunState:
    """The state from the checkpoint in the folder; a new state if there is no folder or no checkpoint."""
    server = fresh_server(setup)
    if folder is None:
        return RunState(setup, server, ClientStore(None, memory))
    folder.lock()
    inputs = environment["inputs"]
    store = ClientStore(folder.path / "clients", memory, identity(setup.experiment, inputs))
    state = RunState(setup, server, store, folder, inputs=inputs)
    if not folder.exists():
        folder.create(setup.experiment, *_origin(setup, environment))
        return state
    differences, started = setup.experiment.differences(folder.experiment()), folder.has_checkpoint()
    if differences and (started or folder.rows("metrics", 1)):
        raise CheckpointError(
            f"{folder.path} holds another experiment ({'; '.join(differences)}); choose another folder"
        )
    if not started:  # the run starts again, maybe with other data
        folder.record(setup.experiment, *_origin(setup, environment))
        state.clean()
        return state
    checkpoints = folder.resumable(partial(_check, state, folder.path))
    state.restore(*checkpoints)
    state.clean(checkpoints[0])
    log.info("%s: continuing after round %d", folder.path, server.round)
    return state


def _check(state: RunState, path: Path, checkpoint: Checkpoint, before: Checkpoint | None) -> None:
    """Raise `CheckpointError` unless the run can continue from this checkpoint."""
    theirs = checkpoint.plain.get("inputs", {})
    here, there = state.inputs["device"], theirs.get("device", "cpu")
    if here != there:
        raise CheckpointError(
            f"{path} was run on {there}, and {here} computes other bits: continue with device={there!r}, or choose "
            "another folder"
        )
    changed = [key for key, value in state.inputs.items() if theirs.get(key) != value]
    if changed:
        remedy = "call torch.manual_seed before you make the model" if "model" in changed else "pass the same data"
        raise CheckpointError(
            f"{path} was run with other data or another model (differs: {', '.join(changed)}); {remedy}, or "
            "choose another folder"
        )
    if checkpoint.run != state.run:
        raise CheckpointError(f"the checkpoint in {path} is of another run; nothing was deleted")
    state.store.check(checkpoint.versions, before.versions if before else {})


def _origin(setup: Setup, environment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment (versions, preset, inputs) and the partition, for `RunFolder.record`."""
    used = {"device": ", ".join(map(str, setup.devices))}
    return describe_environment() | used | environment, partition_record(setup.federation)


def _go_on(
    state: RunState,
    choose: Callable[..., list[int]],
    callbacks: Sequence[Callback],
    make: Callable[[Setup], Backend],
) -> None:
    run, setup = Run(state), state.setup
    with contextlib.ExitStack() as endings:
        gc.freeze()  # what is there already need not be searched for garbage in every round
        endings.callback(gc.unfreeze)
        backend = make(setup)  # first: processes must not be forked after a callback has started threads
        endings.callback(backend.close)
        loop = RoundLoop(setup, state.server, backend, state.store, choose)
        loop.arrived = partial(_tell, run, callbacks)
        try:
            _start(run, callbacks, endings)
            with interruptible() as loop.safe:
                _rounds(run, loop, callbacks)
            _save_pictures(state, loop)
            state.save()
        except KeyboardInterrupt:
            state.failure = "interrupted"
            _save_whole(state)
            where = f"; run the same command again to continue from {run.out}" if run.out and not state.finished else ""
            raise InterruptedRunError(f"interrupted after round {state.server.round}{where}") from None
        except Exception:
            state.failure = "failed"
            _save_whole(state)
            raise


def _save_pictures(state: RunState, loop: RoundLoop) -> None:
    """Keep what the report is to show of the test sets, where the task shows anything."""
    found = pictures(state.setup, loop.evaluated) if state.folder is not None else {}
    if state.folder is not None and found:
        state.folder.save_weights("pictures", found, {"classes": json.dumps(state.setup.federation.class_names)})


def _tell(run: Run, callbacks: Sequence[Callback], done: int, asked: int) -> None:
    for callback in callbacks:
        callback.client(run, done, asked)


def _start(run: Run, callbacks: Sequence[Callback], endings: contextlib.ExitStack) -> None:
    answers: list[Stop] = []
    for callback in callbacks:
        answers.append(callback.start(run))
        endings.callback(callback.end, run)
    run._state.stopped = _why(callbacks, answers)


def _rounds(run: Run, loop: RoundLoop, callbacks: Sequence[Callback]) -> None:
    state, saved = run._state, time.monotonic()
    while not state.finished and not state.stopped:
        metrics = loop.run_round()
        state.record(metrics, loop.rows, loop.evaluations)
        try:
            state.stopped = _why(callbacks, [callback.round(run, metrics) for callback in callbacks])
        finally:
            state.write_metrics()
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            state.save()
            saved = time.monotonic()


def _why(callbacks: Sequence[Callback], answers: Sequence[Stop]) -> str:
    """Why to stop: the answer of the first callback that wants to stop; empty if none does."""
    for callback, answer in zip(callbacks, answers, strict=True):
        if answer:
            return answer if isinstance(answer, str) else f"{type(callback).__name__} asked for it"
    return ""


def _save_whole(state: RunState) -> None:
    """Save, unless the last round is incomplete: that round will be run again from the last checkpoint."""
    if 0 < state.server.round == len(state.metrics):
        state.save()
