"""Build a setup from an experiment: data, model and method, checked against each other."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedflat import specs
from fedflat.core import streams
from fedflat.core.compiled import check_compiler, uncompiled
from fedflat.core.devices import CPU, resolve
from fedflat.core.devices import check as check_device
from fedflat.core.flat import FlatModel, Names
from fedflat.core.method import Method
from fedflat.core.optimizer_choice import OPTIMIZERS, optimizer_of
from fedflat.core.optimizers import SHARED
from fedflat.core.part import Part
from fedflat.core.participation import AUTO, LAWS
from fedflat.core.private import Private
from fedflat.core.samples import Samples
from fedflat.core.schedules import schedules
from fedflat.data import DATASETS, NATURAL, PARTITIONS, Federation, load_federation
from fedflat.engine.faults import one_number
from fedflat.engine.measuring import choose_metrics, describe_task, tried
from fedflat.engine.microbatches import check_pieces
from fedflat.engine.setup import Criterion, Setup
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment
from fedflat.models import MODELS, build_model
from fedflat.models.weights import file_hash, load_weights
from fedflat.parts.batchnorm import POLICIES
from fedflat.parts.evaluated import AllClients, Selected
from fedflat.parts.observers import INTERFERENCE, observers
from fedflat.parts.schedules import step_schedules
from fedflat.tasks import LOSSES, loss_of
from fedflat.tasks.metrics import Wanted

log = logging.getLogger(__name__)


def make_setup(
    experiment: Experiment,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    metrics: Wanted = (),
    root: str | Path | None = None,
    watch: Sequence[str] = (),
    watch_every: int = 1,
    sampled: bool = True,
) -> Setup:
    """Data, model and method of an experiment, checked against each other.

    Args:
        experiment: The experiment.
        federation: Data to use instead of `experiment.data`.
        model: Network to use instead of `experiment.model`.
        loss: Loss to use instead of `experiment.loss`: a function of (output, y), a mean over the batch.
        metrics: What to measure besides the task's own metrics; see `fedflat.tasks.metrics_of`.
        root: Folder of the data sets; see `fedflat.data.data_root`.
        watch: Names of observers; see `fedflat.parts.observers`.
        watch_every: Rounds between observations.
        sampled: Whether `participation` draws the participants, rather than the user.
    """
    _check_kinds(federation, model, loss)
    model = None if model is None else uncompiled(model)
    looking = observers(watch, watch_every)
    check_spelling(experiment, own_data=federation is not None, own_model=model is not None)
    e = settled(experiment, federation, model)
    if federation is None:
        federation = load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)
        told = (federation.partition, len(federation)) == (e.partition, e.clients) and e.participation != AUTO
        e = e if told else settled(e, federation, model)
    if e.new_clients >= len(federation):
        raise InputError(f"new_clients={e.new_clients} leaves none of the {len(federation)} clients to train")
    if model is not None and e.weights is not None:
        raise InputError("weights= is for networks of the package: load them into your own model before the run")
    if model is not None:
        model = copy.deepcopy(model).to(CPU)  # workers, which have devices, make their own copies
    setup = assemble(e, federation, model, loss)
    setup.method, setup.sampled, setup.devices = Method([*setup.method.parts, *looking]), sampled, resolve(e.device)
    check_device(setup.devices, precision=e.precision, dtype=e.dtype, compile=e.compile)
    if e.compile != "none":
        _check_compile(setup)
    if INTERFERENCE in watch:
        if not federation.has_client_tests:
            raise InputError(f"{INTERFERENCE} needs clients with test data of their own, and there are none")
        setup.interference_every = watch_every
    federation.check(_try_out(setup, own_loss=loss is not None))
    check_pieces(setup)
    choose_metrics(setup, metrics)
    for part in setup.method.filling("check"):
        part.check(setup)
    _check_server_lr(setup)
    if e.lr == 0:
        log.warning("lr is 0: the clients will not learn")
    if e.weighting == "samples" and setup.method.uniform:
        log.warning("%s needs unweighted means over clients; weighting='samples' breaks its formulas", setup.method)
    return setup


def _check_compile(setup: Setup) -> None:
    """Refuse to compile a network that a part looks into, or for which there is no compiler."""
    mode, device = setup.experiment.compile, setup.devices[0]
    for part in (*setup.method.filling("around_forward"), *setup.method.filling("further_losses")):
        raise InputError(f"{part.name} looks into the network, which compile={mode!r} closes: use compile='none'")
    check_compiler(device.type, mode)
    if device != CPU:
        log.warning("compile=%r was not measured on a GPU by us: please tell what make gpu-check prints", mode)


def _check_kinds(federation: Any, model: Any, loss: Any) -> None:
    for name, value, kind in (("federation", federation, Federation), ("model", model, nn.Module)):
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{name}= takes a {kind.__name__}, not {type(value).__name__}")
    if loss is not None and not callable(loss):
        raise InputError(f"loss= takes a function of (output, y), not {type(loss).__name__}")


def settled(e: Experiment, federation: Federation | None = None, model: nn.Module | None = None) -> Experiment:
    """The experiment as it is run and recorded.

    Its method and its optimiser have their one name. Data and a model of the user's own replace what the fields say of
    them: a record tells the federation's name and number of clients, and the class of the model.
    """
    optimizer = optimizer_of(e)
    changes: dict[str, Any] = {"method": str(Method.parse(e.method)), "optimizer": str(optimizer)}
    changes |= {name: getattr(optimizer, name) for name in SHARED if hasattr(optimizer, name)}
    if federation is not None:
        if e.clients not in (len(federation), Experiment.clients):
            raise InputError(
                f"clients={e.clients}, but the federation has {len(federation)} clients: leave clients= out"
            )
        changes |= {"data": federation.name, "partition": federation.partition, "clients": len(federation)}
    if model is not None:
        changes["model"] = type(model).__name__
    if e.participation == AUTO and (federation is not None or specs.parse(e.data).name not in NATURAL):
        changes["participation"] = "bernoulli(0.1)" if federation is None or federation.divided else "all"
    return e.replace(**changes)


def check_spelling(e: Experiment, own_data: bool = False, own_model: bool = False) -> None:
    """Refuse a wrong name before data are read."""
    Method.parse(e.method)
    schedules(e.lr_schedule)
    named: list[tuple[str, str, Collection[str]]] = [("participation", e.participation, (*LAWS, AUTO))]
    named.append(("optimizer", e.optimizer, OPTIMIZERS))
    named += [] if own_data else [("data set", e.data, DATASETS), ("partition", e.partition, PARTITIONS)]
    named += [] if own_model else [("model", e.model, MODELS)]
    named += [] if e.loss == "auto" else [("loss", e.loss, LOSSES)]
    for kind, text, known in named:
        try:
            name = specs.parse(text).name
        except InputError as error:
            raise InputError(f"{kind}: {error}; known: {', '.join(sorted(known))}") from None
        if name not in known:
            raise UnknownNameError(kind, name, known)
    optimizer_of(e)


def assemble(
    e: Experiment,
    federation: Federation,
    model: nn.Module | None,
    loss: Criterion | None = None,
    shape: tuple[int, ...] | None = None,
    load: bool = True,
) -> Setup:
    """A setup without the checks of `make_setup`.

    Args:
        e, federation, model, loss: As for `make_setup`.
        shape: That of one sample, if the federation holds none.
        load: Whether to read `e.weights`; not for a run that has weights already.
    """
    method, evaluator = _evaluation(Method.parse(e.method), e.evaluated)
    method = Method([*method.parts, *POLICIES.get(e.batchnorm, ()), *step_schedules(e.lr_schedule)])
    make: Callable[[], nn.Module] | None = None
    if model is None:
        # Shape and classes first: reading data may draw random numbers, which must not change the weights.
        shape, classes = shape or federation.input_shape, federation.classes
        make = partial(build_model, e.model, shape, classes)
        with streams.isolated(e.seed, "init"):
            model = make()
        if e.weights is not None and load:
            load_weights(model, e.weights)
    dtype = getattr(torch, e.dtype)
    rebuild = partial(_rebuilt, method.filling("build"), dtype)
    model = rebuild(model)
    names: Names = {"head": e.head, "features": e.features, "last_stage": e.last_stage}
    flat = FlatModel(model, dtype, **names, precision=e.precision)
    flat.make = None if make is None else partial(_made, make, rebuild)
    if isinstance(loss, nn.Module):  # its tensors, such as class weights, must have the same type
        loss = copy.deepcopy(loss).to(dtype)
    uniform = method.uniform if e.weighting == "auto" else e.weighting == "uniform"
    private = [(part, list(part.private(flat))) for part in method.filling("private")]
    whole = {part.name for part, names in private if not names}
    splits = any(not part.common_model and part.name not in whole for part in method.parts)
    return Setup(
        e,
        method,
        flat,
        federation,
        loss or (federation.task.loss if e.loss == "auto" else loss_of(e.loss)),
        uniform,
        Private(flat, (n for _, names in private for n in names), splits),
        evaluator,
    )


def _rebuilt(parts: Sequence[Part], dtype: torch.dtype, module: nn.Module) -> nn.Module:
    """The network as the parts change it."""
    for part in parts:
        module = part.build(copy.deepcopy(module).to(dtype))
    return module


def _made(make: Callable[[], nn.Module], rebuild: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return rebuild(make())


def _evaluation(method: Method, evaluated: str) -> tuple[Method, Part | None]:
    """The method, with a part added if the evaluated weights need one, and the part that computes them."""
    offered = method.filling("evaluation_weights")
    if evaluated == "server" or (evaluated == "auto" and not offered):
        return method, None
    if evaluated in ("auto", "averaged"):
        if not offered:
            raise InputError(f"evaluated='averaged': no part of {str(method)!r} makes an average; add swa, for example")
        return method, offered[0]
    part: Part = Selected() if evaluated == "selected" else AllClients()
    return method + part, part


def _try_out(setup: Setup, own_loss: bool) -> int | None:
    """Try the model on one sample of a client and one of the test set; returns its number of classes.

    With a user's own loss, what the model should return is unknown, and nothing is tried.
    """
    classes = None
    if own_loss:
        _check_own_loss(setup)
        return None
    task = setup.federation.task
    first = setup.federation.called(0), setup.federation.samples(0)
    for where, samples in (first, ("the test set", setup.federation.test)):
        if samples is None or len(samples) == 0:
            continue
        try:
            output, y = tried(setup, samples)
            task.check(output, y)
            classes = int(output.shape[1]) if isinstance(output, Tensor) and output.dim() > 1 else None
            setup.criterion(output, y)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the model does not take the data of {where}: {error}{_hint(error, samples)}") from error
    return classes


def _hint(error: Exception, samples: Samples) -> str:
    """What to do where the type of the inputs is wrong: whole numbers reach the model as they are."""
    x = samples.batch(torch.arange(1))[0]
    wrong = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.uint8 and "dtype" in str(error)
    return f". The inputs are {str(x.dtype).removeprefix('torch.')}: make them uint8 or floating point" if wrong else ""


def _check_own_loss(setup: Setup) -> None:
    """Refuse a loss that gives more than one number; if it cannot be tried on two samples, training will tell why."""
    samples = setup.federation.samples(0)
    x, y = samples.batch(torch.arange(min(2, len(samples))))
    setup.model.module.eval()
    try:
        with torch.no_grad():
            loss = setup.criterion(setup.model(setup.federation.preprocess(x, None, setup.model.theta.dtype)), y)
    except Exception as error:
        log.debug("the loss cannot be tried out: %s", error)
        return
    one_number(loss)


def _check_server_lr(setup: Setup) -> None:
    owner = setup.method.owner("step")
    if owner.ignores_server_lr and setup.experiment.server_lr != 1.0:
        raise InputError(f"{owner.name} defines its own server step ({owner.ignores_server_lr}): leave server_lr at 1")


def describe_inputs(setup: Setup, own: Mapping[str, Any], participants: Any = None) -> dict[str, Any]:
    """What identifies data and model, and what `load_run` needs to rebuild the model.

    Args:
        own: What the user gave as "federation" and "model", None where it is the experiment's.
    """
    custom_model = own.get("model") is not None
    identity = hashlib.sha256("".join(f"{span.name}{span.shape}" for span in setup.model.spans).encode())
    identity.update(setup.model.theta.numpy().tobytes())
    for name, tensor in setup.model.frozen:
        identity.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    federation = setup.federation
    return details(setup) | {
        "data": federation.fingerprint(),
        "model": identity.hexdigest()[:16],
        "weights": None if setup.experiment.weights is None else file_hash(setup.experiment.weights),
        "participants": None if participants is None else _name(participants),
        "stack": setup.stack,
        "device": setup.devices[0].type,
        "custom_data": own.get("federation") is not None,
        "custom_model": custom_model,
        "clients": len(federation),
        "classes": None if custom_model else federation.classes,
        "shape": None if custom_model else list(federation.input_shape),
    }


def details(setup: Setup) -> dict[str, Any]:
    """What records tell of a run beside the fields of its experiment."""
    names = setup.federation.names
    told = {"parameters": setup.model.size, "loss": _name(setup.criterion), "task": describe_task(setup)}
    frozen = sum(tensor.numel() for _, tensor in setup.model.frozen)
    return told | ({"frozen": frozen} if frozen else {}) | ({} if names is None else {"names": names})


def _name(thing: Any) -> str:
    """The name of a user's function or module."""
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
