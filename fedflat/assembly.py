"""From an experiment to a task: data, model and method, checked against each other."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import calls, streams
from fedflat.data import DATASETS, PARTITIONS, Federation, load_federation
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment
from fedflat.flat import FlatModel
from fedflat.method import Method, Part
from fedflat.models import MODELS, build_model
from fedflat.participation import LAWS
from fedflat.parts.batchnorm import POLICIES
from fedflat.parts.evaluated import AllClients, Selected
from fedflat.parts.observers import INTERFERENCE, observers
from fedflat.private import Private
from fedflat.task import Criterion, Task

log = logging.getLogger(__name__)


def make_task(
    experiment: Experiment,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    root: str | Path | None = None,
    watch: Sequence[str] = (),
    watch_every: int = 1,
    sampled: bool = True,
) -> Task:
    """Data, model and method of an experiment, checked against each other.

    watch: see `fedflat.parts.observers`. sampled: whether `participation` draws who trains, and not the user.
    """
    e = experiment
    _check_kinds(federation, model, loss)
    looking = observers(watch, watch_every)
    check_spelling(e, own_data=federation is not None, own_model=model is not None)
    if federation is None:
        federation = load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)
    if e.new_clients >= len(federation):
        raise InputError(f"new_clients={e.new_clients} leaves none of the {len(federation)} clients to train")
    task = assemble(e, federation, model, loss)
    task.method, task.sampled = Method([*task.method.parts, *looking]), sampled
    if INTERFERENCE in watch:
        if not federation.has_client_tests:
            raise InputError(f"{INTERFERENCE} watches the clients' own test data, of which there are none")
        task.interference_every = watch_every
    federation.check(_try_out(task))
    for part in task.method.filling("check"):
        part.check(task)
    _check_server_lr(task)
    if e.weighting == "samples" and task.method.uniform:
        log.warning("%s: its invariants need plain means over clients; weighting='samples' breaks them", task.method)
    return task


def _check_kinds(federation: Any, model: Any, loss: Any) -> None:
    for name, value, kind in (("federation", federation, Federation), ("model", model, nn.Module)):
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{name}= takes a {kind.__name__}, not {type(value).__name__}")
    if loss is not None and not callable(loss):
        raise InputError(f"loss= takes a function of (output, y), not {type(loss).__name__}")


def check_spelling(e: Experiment, own_data: bool = False, own_model: bool = False) -> None:
    """Tell a wrong name before data are read."""
    Method.parse(e.method)
    named: list[tuple[str, str, Collection[str]]] = [("participation", e.participation, LAWS)]
    named += [] if own_data else [("data set", e.data, DATASETS), ("partition", e.partition, PARTITIONS)]
    named += [] if own_model else [("model", e.model, MODELS)]
    for kind, text, known in named:
        try:
            name = calls.parse(text).name
        except InputError as error:
            raise InputError(f"{kind}: {error}; known: {', '.join(sorted(known))}") from None
        if name not in known:
            raise UnknownNameError(kind, name, known)


def assemble(
    e: Experiment,
    federation: Federation,
    model: nn.Module | None,
    loss: Criterion | None = None,
    shape: tuple[int, ...] | None = None,
) -> Task:
    """A task without the checks. shape: of one sample, where the federation holds none to look at."""
    method, evaluator = _evaluation(Method.parse(e.method), e.evaluated)
    method = Method([*method.parts, *POLICIES.get(e.batchnorm, ())])
    if model is None:
        # Shape and classes first: looking at data may draw, and must not move the stream of the weights.
        shape, classes = shape or federation.input_shape, federation.classes
        with streams.isolated(e.seed, "init"):
            model = build_model(e.model, shape, classes)
    for part in method.filling("build"):
        model = part.build(copy.deepcopy(model))
    dtype = getattr(torch, e.dtype)
    names = {"head": e.head, "features": e.features, "last_stage": e.last_stage}
    flat = FlatModel(model, dtype, **names, precision=e.precision)
    if isinstance(loss, nn.Module):  # its own tensors, such as class weights, must be of the same type
        loss = copy.deepcopy(loss).to(dtype)
    uniform = method.uniform if e.weighting == "auto" else e.weighting == "uniform"
    for part in method.filling("prepare"):
        part.prepare(flat)
    private = [(part, list(part.private(flat))) for part in method.filling("private")]
    splits = any(part.splits and names for part, names in private)
    return Task(
        e,
        method,
        flat,
        federation,
        loss or F.cross_entropy,
        uniform,
        Private(flat, (n for _, names in private for n in names), splits),
        evaluator,
    )


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


def _try_out(task: Task) -> int | None:
    """How many classes the model tells apart: try it on one sample of a client and one of the test set.

    With a loss of the user's nothing is known of what the model should return, and nothing is tried.
    """
    classes = None
    if task.criterion is not F.cross_entropy:
        return None
    for where, samples in (("client 0", task.federation.samples(0)), ("the test set", task.federation.test)):
        if samples is None or len(samples) == 0:
            continue
        x, y = samples.batch(torch.zeros(1, dtype=torch.int64))
        task.model.module.eval()
        try:
            with torch.no_grad():
                output = task.model(task.federation.preprocess(x, None, task.model.theta.dtype))
                classes = _classes(output, y)
                task.criterion(output, y)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the model does not take the data of {where}: {error}") from error
    return classes


def _classes(output: Any, y: Tensor) -> int:
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise InputError("the model must return one row of class scores a sample; for other outputs give loss=…")
    if y.is_floating_point() and output.shape[1] < 2:
        raise InputError("the targets are numbers, not classes, which cross-entropy cannot learn: give loss=…")
    return int(output.shape[1])


def _check_server_lr(task: Task) -> None:
    owner = task.method.owner("step")
    if owner.own_step and task.experiment.server_lr != 1.0:
        raise InputError(f"{owner.name} defines its own server step ({owner.own_step}): leave server_lr at 1")


def describe_inputs(task: Task, custom_model: bool, participants: Any = None) -> dict[str, Any]:
    """What tells two sets of data and models apart, and what `load_run` must know to rebuild the model."""
    names = "".join(f"{span.name}{span.shape}" for span in task.model.spans).encode()
    weights = task.model.theta.numpy().tobytes()
    federation = task.federation
    return {
        "data": federation.fingerprint(),
        "model": hashlib.sha256(names + weights).hexdigest()[:16],
        "loss": _name(task.criterion),
        "participants": None if participants is None else _name(participants),
        "custom_model": custom_model,
        "clients": len(federation),
        "classes": None if custom_model else federation.classes,
        "shape": None if custom_model else list(federation.input_shape),
    }


def _name(thing: Any) -> str:
    """What a function or a module of the user's is called, as far as that tells it apart."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
