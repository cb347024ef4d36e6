"""A client's models judged on its own test data: the common one, its personal one, and one adapted to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedflat import streams
from fedflat.client import LocalLoop, local_view
from fedflat.data.federation import Samples
from fedflat.errors import FedflatError, RunError
from fedflat.method import State, Update
from fedflat.private import Private
from fedflat.scoring import Score, assess
from fedflat.statistics import using_batch
from fedflat.task import Job, Task, load_weights

KEY = "examine"
MODELS = ("common", "personal", "adapted")
"""Which model of a client a score is about."""


def examine(task: Task, job: Job) -> Update:
    """Score the models that client has on its own test data; `scores` reads them from the update.

    job.theta: the weights to evaluate. A model is left out where the method has none of its kind for this client.
    """
    start, test = time.perf_counter(), task.federation.client_test(job.client)
    found: State = {}
    try:
        if test is not None:
            with streams.isolated(task.experiment.seed, "examine", job.round, job.client):
                found = {name: _numbers(score) for name, score in _judged(task, job, test)}
    except FedflatError:
        raise
    except Exception as error:
        raise RunError(f"evaluation of client {job.client} failed: {type(error).__name__}: {error}") from error
    samples = 0 if test is None else len(test)
    return Update(job.client, samples, time.perf_counter() - start, sent={KEY: found})


def _judged(task: Task, job: Job, test: Samples) -> Iterator[tuple[str, Score]]:
    """The common model, then the client's own, then, if that is asked for, the adapted one.

    Adapted are new clients, those of a method whose models are made so, and those that were never drawn by a method
    which keeps part of the network with the clients: they would have no model at all.
    """
    model, method = task.model, task.method
    new, adapts = job.client >= task.clients, method.owner("adapt").adapts
    if not task.private.splits and not method.filling("generate"):
        load_weights(model, job.theta, job.buffers, job.counters)
        with using_batch(model.module, task.private.names):
            yield "common", assess(task, test, 0, len(test))
    task.receive(job)
    if Private.KEY in job.states:
        yield "personal", assess(task, test, 0, len(test))
    weights = personal_weights(task, job.states)
    if weights is not None:
        with model.loaded(weights["theta"], weights.get("buffers")):
            yield "personal", assess(task, test, 0, len(test))
    if new or adapts or (task.private.splits and Private.KEY not in job.states):
        _adapt(task, job)
        score = assess(task, test, 0, len(test))
        yield "adapted", score
        if adapts and not new:
            yield "personal", score


def personal_weights(task: Task, states: Mapping[str, State]) -> State | None:
    """The client's own model as one of the method's parts keeps it; the task's model holds what the client receives.

    A client that has not trained yet lacks the layers that stay with it, and so a model.
    """
    if task.private.splits and Private.KEY not in states:
        return None
    for part in task.method.filling("personal"):
        weights = part.personal(states.get(part.name, {}), task.model.theta.clone())
        if weights is not None:
            return weights
    return None


def _adapt(task: Task, job: Job) -> None:
    """Train on the client's own data, as the method says, without any of this being sent or kept."""
    origin = task.receive(job)
    task.model.module.train()
    samples = task.federation.samples(job.client)
    local = local_view(task, job, origin, len(samples))
    for part in task.method.filling("begin"):
        part.begin(local)
    task.method.owner("adapt").adapt(local, LocalLoop(task, local, samples).fit)


def _numbers(score: Score) -> Tensor:
    return torch.tensor([score.count, score.loss, score.correct, score.judged], dtype=torch.float64)


def scores(update: Update) -> dict[str, Score]:
    """Scores by model from what `examine` returned."""
    return {name: _score(*tensor.tolist()) for name, tensor in update.sent[KEY].items()}


def _score(*numbers: Any) -> Score:
    count, loss, correct, judged = numbers
    return Score(int(count), loss, int(correct), int(judged))
