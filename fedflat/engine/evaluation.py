"""Evaluation: the common model on the common test set, and every client's models on its own test data."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.batchnorm import using_batch
from fedflat.core.fairness import Fairness
from fedflat.core.inputs import map_inputs
from fedflat.core.lockstep import filled
from fedflat.core.private import Private
from fedflat.core.samples import IGNORED, Samples
from fedflat.core.scores import Score, pieces
from fedflat.core.stacked import StackedModel
from fedflat.core.tensors import State
from fedflat.core.updates import Updates
from fedflat.core.views import Local, Server, Update
from fedflat.data.several import Several
from fedflat.engine.local_loop import LocalLoop, alike, local_view, stack_view
from fedflat.engine.placement import explaining_memory
from fedflat.engine.setup import Broadcast, Chunk, Job, Jobs, Setup, Split
from fedflat.errors import FedflatError, RunError
from fedflat.tasks import Metric

log = logging.getLogger(__name__)
CHUNK, EVALUATION_BATCH = 1000, 250
TOGETHER = 1000  # samples of several clients that are scored at once
KEY = "evaluate"  # the name of the scores in an update
MODELS = ("common", "personal", "adapted")
"""The models of a client that are scored."""
Row = dict[str, Any]


def chunks_of(count: int, split: Split, client: int = -1, test: str = "") -> list[Chunk]:
    """Cut `count` samples into chunks. Borders depend on nothing else, so that sums have a fixed order."""
    return [Chunk(split, client, low, high, test) for low, high in pieces(0, count, CHUNK)]


def score_chunk(setup: Setup, chunk: Chunk) -> Score:
    """Score the model's current weights on one chunk."""
    federation = setup.federation
    if chunk.split == "test":
        samples = federation.test_set(chunk.test, chunk.domain)
    elif chunk.split == "client_test":
        samples = federation.client_test(chunk.client)
    else:
        samples = federation.samples(chunk.client)
    if samples is None:
        return Score()
    try:
        where = explaining_memory(setup, "evaluation")
        with where, streams.isolated(setup.experiment.seed, "evaluation", chunk.start, chunk.client):
            # On common data, statistics that stay with the clients are replaced by those of the batch.
            aside = setup.private.names if chunk.split == "test" and chunk.by_batch else frozenset()
            with using_batch(setup.model.module, aside):
                return score(setup, samples, chunk.start, chunk.stop)
    except FedflatError:
        raise
    except Exception as error:
        raise RunError(f"evaluation failed: {type(error).__name__}: {error}") from error


@torch.no_grad()
def score(setup: Setup, samples: Samples, start: int, stop: int) -> Score:
    """Score the model's current weights on samples start…stop, in evaluation mode."""
    setup.model.module.eval()
    total = Score()
    for low, high in pieces(start, stop, min(EVALUATION_BATCH, getattr(samples, "at_once", EVALUATION_BATCH))):
        x, y = samples.batch(torch.arange(low, high))
        output = setup.model(setup.federation.preprocess(x, None, setup.model.theta.dtype))
        total += judged(setup, output, y)
    return total


def judged(setup: Setup, output: Any, y: Tensor) -> Score:
    """The score of a model's output for one batch."""
    loss = setup.criterion(output, y).item()
    count = len(y) if y.is_floating_point() else int((y != IGNORED).sum())
    return Score(count, loss * count if count else 0.0, counted(setup.metrics, output, y))


def counted(metrics: Iterable[Metric], output: Any, y: Tensor) -> dict[str, np.ndarray]:
    """The sums that the metrics need, by key; metrics with the same key share them."""
    counts = {metric.key: metric.count for metric in metrics}
    return {key: count(output, y).cpu().numpy() for key, count in counts.items()}


def figures(setup: Setup, score: Score, prefix: str = "") -> Row:
    """The metrics and the loss by name; None where there is nothing to measure."""
    names = setup.federation.class_names
    found: Row = {}
    for metric in setup.metrics:
        value = metric.value(score.sums[metric.key]) if metric.key in score.sums else None
        if isinstance(value, list):
            found |= {f"{prefix}{metric.name}_{_part(names, place)}": each for place, each in enumerate(value)}
        else:
            found[f"{prefix}{metric.name}"] = value
    return found | {f"{prefix}loss": score.mean_loss}


def _part(names: Sequence[str], place: int) -> str:
    """The name of a class, or its number."""
    return names[place].lower().replace(" ", "_") if place < len(names) else str(place)


# ---- clients on their own test data ----


def evaluate_client(setup: Setup, broadcast: Broadcast, job: Job) -> Update:
    """Score the client's models on its own test data; `scores` reads the result.

    Models that the method does not have for this client are left out.
    """
    start, test = time.perf_counter(), setup.federation.client_test(job.client)
    found: State = {}
    try:
        if test is not None:
            setup.seed_global("examine", broadcast.round, job.client)
            for name, score in _models(setup, broadcast, job, test):
                found |= _packed(name, score)
    except (FedflatError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RunError(f"evaluation of client {job.client} failed: {type(error).__name__}: {error}") from error
    samples = 0 if test is None else len(test)
    return Update(job.client, samples, time.perf_counter() - start, sent={KEY: found})


def _models(setup: Setup, broadcast: Broadcast, job: Job, test: Samples) -> Iterator[tuple[str, Score]]:
    """Scores of the common model, the client's personal one and the one adapted to it, if they exist.

    The model is adapted to new clients, to all clients if the method's personal models are made this way, and to
    clients that have not trained yet if part of the network stays with the clients: they have no other model.
    """
    model, method = setup.model, setup.method
    new, adapts = job.client >= setup.clients, method.owner("adapt").adapts
    if not setup.private.splits and not method.filling("generate"):
        setup.load(broadcast, job.theta)
        with using_batch(model.module, setup.private.names):
            yield "common", score(setup, test, 0, len(test))
    setup.receive(broadcast, job)
    if Private.KEY in job.states:
        yield "personal", score(setup, test, 0, len(test))
    weights = personal_weights(setup, job.states)
    if weights is not None:
        second = weights.get("second")
        with (
            model.loaded(weights["theta"], weights.get("buffers")),
            model.mixed_with(second, weights.get("share", 1.0)),
        ):
            yield "personal", score(setup, test, 0, len(test))
    if new or adapts or (setup.private.splits and Private.KEY not in job.states):
        _adapt(setup, broadcast, job)
        adapted = score(setup, test, 0, len(test))
        yield "adapted", adapted
        if adapts and not new:
            yield "personal", adapted


def evaluate_together(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    """`evaluate_client` of several clients: those with small test sets share their forward passes."""
    start, found = time.perf_counter(), dict[int, State]()
    tests = {job.client: setup.federation.client_test(job.client) for job in jobs}
    small = [job for job in jobs if 0 < len(tests[job.client] or ()) <= EVALUATION_BATCH]
    try:
        for name, some, theta in _stacked_models(setup, broadcast, small):
            for job, score in zip(some, score_rows(setup, theta, [tests[job.client] for job in some]), strict=True):
                found.setdefault(job.client, {}).update(_packed(name, score))
    except (FedflatError, torch.OutOfMemoryError):
        raise
    except Exception:
        log.debug("stacked evaluation failed", exc_info=True)
        small = []  # one by one, so that the error names the client
    known, seconds = {job.client for job in small}, (time.perf_counter() - start) / max(1, len(small))
    return Updates.of(
        [
            Update(job.client, len(tests[job.client] or ()), seconds, sent={KEY: found.get(job.client, {})})
            if job.client in known
            else evaluate_client(setup, broadcast, job)
            for job in jobs
        ]
    )


def _stacked_models(
    setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]
) -> Iterator[tuple[str, Sequence[Job], Tensor]]:
    """What `_models` says of each client, for several: names of models, the clients that have one, their weights."""
    private, method = setup.private, setup.method
    setup.load(broadcast)
    if jobs and not private.splits and not method.filling("generate"):
        own = [broadcast.theta if job.theta is None else job.theta for job in jobs]
        yield "common", jobs, torch.stack(own)
    models: list[tuple[Job, Tensor]] = []
    for job in jobs:
        setup.receive(broadcast, job)
        weights = personal_weights(setup, job.states)
        if weights is not None or Private.KEY in job.states:
            models.append((job, weights["theta"] if weights is not None else setup.model.theta.clone()))
    if models:
        yield "personal", [job for job, _ in models], torch.stack([theta for _, theta in models])
    adapts = method.owner("adapt").adapts
    asked = [j for j in jobs if j.client >= setup.clients or adapts or (private.splits and Private.KEY not in j.states)]
    for group in alike(setup, Jobs.of(asked)):
        theta = _adapted(setup, broadcast, group)
        yield "adapted", group, theta
        seen = [i for i, job in enumerate(group) if adapts and job.client < setup.clients]
        if seen:
            yield "personal", [group[i] for i in seen], theta[seen]


def _adapted(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Tensor:
    """The weights that `_adapt` makes for clients that are alike, one row each."""
    if len(jobs) == 1:
        setup.seed_global("examine", broadcast.round, jobs[0].client)
        _adapt(setup, broadcast, jobs[0])
        return setup.model.theta.clone().unsqueeze(0)
    samples = Several(setup.federation, jobs.clients)
    local = stack_view(setup, broadcast, jobs, samples, "examine")
    setup.model.module.train()
    _fitted(setup, local, samples)
    return local.theta


def score_rows(setup: Setup, theta: Tensor, tests: Sequence[Samples | None]) -> list[Score]:
    """Score the weights in each row on the test set of a client, in evaluation mode; so many rows at a time as fit."""
    known = [test for test in tests if test is not None]
    rows = max(1, TOGETHER // max(map(len, known), default=1))
    parts = ((theta[low:high], known[low:high]) for low, high in pieces(0, len(known), rows))
    return [score for weights, some in parts for score in _scored(setup, weights, some)]


@torch.no_grad()
def _scored(setup: Setup, theta: Tensor, tests: Sequence[Samples]) -> list[Score]:
    setup.model.module.eval()
    model, batches = StackedModel(setup.model, list, len(theta), setup.folds), list[tuple[Any, Tensor]]()
    model.theta.copy_(theta)
    for test in tests:
        x, y = test.batch(torch.arange(len(test)))
        batches.append((setup.federation.preprocess(x, None, theta.dtype), y))
    outputs = model(filled([x for x, _ in batches], max(len(y) for _, y in batches), 0))
    model.take_features()

    def own(leaf: Any, i: int, count: int) -> Any:
        return leaf[i, :count] if isinstance(leaf, Tensor) else leaf

    rows = ((map_inputs(partial(own, i=i, count=len(y)), outputs), y) for i, (_, y) in enumerate(batches))
    return [judged(setup, output, y) for output, y in rows]


def personal_weights(setup: Setup, states: Mapping[str, State]) -> State | None:
    """The client's personal model, if a part keeps one; the setup's model holds what the client receives.

    A client that has not trained yet has no model if part of the network stays with the clients.
    """
    if setup.private.splits and Private.KEY not in states:
        return None
    for part in setup.method.filling("personal"):
        weights = part.personal(states.get(part.name, {}), setup.model.theta.clone())
        if weights is not None:
            return weights
    return None


def _adapt(setup: Setup, broadcast: Broadcast, job: Job) -> None:
    """Train on the client's data as the method prescribes; the result is neither sent nor kept."""
    origin = setup.receive(broadcast, job)
    setup.model.module.train()
    samples = setup.federation.samples(job.client)
    _fitted(setup, local_view(setup, broadcast, job, origin, len(samples)), [samples])


def _fitted(setup: Setup, local: Local, samples: Sequence[Samples]) -> None:
    loop = LocalLoop(setup, local, samples)
    for part in setup.method.filling("begin"):
        part.begin(local)
    setup.method.owner("adapt").adapt(local, loop.fit)
    for client, (_, failure) in zip(local.numbers, loop.outcomes(), strict=True):
        if failure:
            raise ArithmeticError(f"client {client}: {failure}")


def _packed(model: str, score: Score) -> State:
    """A score as tensors: count and loss under the model's name, sums under "model/key"."""
    head = torch.tensor([score.count, score.loss], dtype=torch.float64)
    return {model: head} | {f"{model}/{key}": torch.from_numpy(value) for key, value in score.sums.items()}


def scores(update: Update) -> dict[str, Score]:
    """The scores by model in an update of `evaluate_client`."""
    sent, found = update.sent.get(KEY, {}), dict[str, Score]()
    for model in MODELS:
        if model in sent:
            count, loss = sent[model].tolist()
            own = {name.removeprefix(f"{model}/"): t for name, t in sent.items() if name.startswith(f"{model}/")}
            found[model] = Score(int(count), loss, {key: tensor.numpy() for key, tensor in own.items()})
    return found


def client_figures(setup: Setup, found: Mapping[str, Score]) -> Row:
    """A client's figures: the leading one under the model's name, the others as "model_metric"."""
    row: Row = dict.fromkeys(MODELS)
    for model, score in found.items():
        values = figures(setup, score)
        row[model] = values.pop(setup.lead)
        row |= {f"{model}_{name}": value for name, value in values.items()}
    return row


def summary(setup: Setup, rows: list[Row]) -> Row:
    """Summaries of `Fairness` over the clients that may train, for the common and the personal models."""
    found: Row = {}
    for model, prefix in (("common", "clients"), ("personal", "personal")):
        values = [row[model] for row in rows if not row["new"] and row[model] is not None]
        if values:
            found |= {f"{prefix}_{name}": value for name, value in Fairness.of(values, setup.falls).summary().items()}
    return found


# ---- which weights are evaluated ----

RECOMPUTED = "recompute"  # the server's state with recomputed BatchNorm statistics, until the weights change


def evaluated_weights(setup: Setup, server: Server) -> Tensor:
    """The weights that `Experiment.evaluated` names; the server's weights if there is no average yet."""
    weights = setup.evaluator.evaluation_weights(server) if setup.evaluator else None
    return server.theta if weights is None else weights


def evaluated_buffers(server: Server) -> tuple[Tensor, Tensor]:
    """Buffers and counters of the evaluated weights."""
    own = server.states.get(RECOMPUTED)
    return (own["buffers"], own["counters"]) if own else (server.buffers, server.counters)


def evaluated_broadcast(setup: Setup, server: Server) -> Broadcast:
    """The evaluated weights and their statistics as a broadcast."""
    return Broadcast(server.round, server.lr, evaluated_weights(setup, server), *evaluated_buffers(server))
