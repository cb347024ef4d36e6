"""The jobs of a client: train, estimate statistics, evaluate."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.batchnorm import averaging_statistics
from fedflat.core.devices import CPU, hosted, moved, numbers, on
from fedflat.core.private import Private
from fedflat.core.samples import Samples
from fedflat.core.sums import Summable, TreeSum
from fedflat.core.updates import NUMBERS, Updates
from fedflat.core.views import EMPTY, Local, Update
from fedflat.data.several import Several
from fedflat.engine.evaluation import evaluate_client, evaluate_together
from fedflat.engine.faults import check_states, vector_like
from fedflat.engine.local_loop import LocalLoop, alike, local_view, stack_view
from fedflat.engine.placement import explaining_memory
from fedflat.engine.preparing import prepared
from fedflat.engine.setup import Broadcast, Job, Jobs, Setup
from fedflat.engine.terms import each_row, estimated_terms, stacked_terms, training_terms
from fedflat.errors import ClientError, DataError, InputError

log = logging.getLogger(__name__)
NAMED = 20  # clients that a message names


class Kind(NamedTuple):
    """One kind of job.

    Attributes:
        work: Runs where the client's data are.
        terms: The sum of what updates add to the sums of the round, see `engine.terms`; runs where terms are added.
        together: Does the work of several clients at once; None: they are done one by one.
        trains: Whether the work needs minibatches.
    """

    work: Callable[[Setup, Broadcast, Job], Update]
    terms: Callable[[Setup, Sequence[Update]], Summable | None]
    together: Callable[[Setup, Broadcast, Jobs], Updates] | None = None
    trains: bool = False


def run_jobs(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    """Do the jobs of clients, all of one kind.

    If clients are stacked, the result depends on which ones are given together.
    """
    with explaining_memory(setup, f"{named(jobs)} in round {broadcast.round}"):
        if setup.device != CPU:
            broadcast, jobs = broadcast.on(setup.device), jobs.on(setup.device)
        return _unseeded(setup, broadcast, jobs) or _done(setup, broadcast, jobs)


def _unseeded(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates | None:
    """The jobs done without seeds for the global generators, which most clients never use.

    If anything has drawn from these generators, the result does not count and is None: now it is known that they must
    be seeded for every client.
    """
    if setup.draws:
        return None
    before, updates = streams.global_states(), None
    try:
        setup.draws = False
        updates = _done(setup, broadcast, jobs)
    except Exception:
        if streams.global_states() == before:
            raise
    finally:
        setup.draws = None if streams.global_states() == before else True
    return None if setup.draws else updates


def _done(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    kind = JOBS[jobs.kind]
    if setup.stack > 1 and len(jobs) > 1 and kind.together is not None:
        return kind.together(setup, broadcast, jobs)
    return _one_by_one(kind, setup, broadcast, jobs)


def _one_by_one(kind: Kind, setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    with prepared(setup, broadcast.round, jobs.clients if kind.trains else ()):
        updates = [kind.work(setup, broadcast, job).hosted() for job in jobs]
    return Updates.of(updates, kind.terms(setup, updates))


def named(jobs: Jobs) -> str:
    """The clients of jobs, for messages; the first of many."""
    shown = ", ".join(map(str, jobs.clients[:NAMED]))
    more = f" and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
    return ("client " if len(jobs) == 1 else "clients ") + shown + more


def train(setup: Setup, broadcast: Broadcast, job: Job) -> Update:
    """Run one client's round. If it diverges, or its data cannot be read, `failure` of the update says where."""
    setup.seed_global("model", broadcast.round, job.client)
    origin, local = setup.receive(broadcast, job), None
    try:
        ahead = setup.ahead.get(job.client)
        samples = setup.federation.samples(job.client) if ahead is None else ahead[0]
        local = local_view(setup, broadcast, job, origin, len(samples))
        return _update(job, local, _trained(setup, broadcast, local, [samples]))
    except DataError as error:  # a damaged file of one client must not end the run
        return Update(job.client, setup.federation.size(job.client), 0.0, failure=f"its data cannot be read: {error}")
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        step = int(local.steps) if local else None
        raise ClientError(broadcast.round, job.client, step, traceback.format_exc()) from error


def train_together(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    """Run the rounds of several clients, in lockstep where they are alike."""
    groups = alike(setup, jobs)
    if len(groups) == 1:
        return train_stack(setup, broadcast, jobs)
    made = [train_stack(setup, broadcast, group) for group in groups]
    by_client = {update.client: update for updates in made for update in updates}
    place, total = {updates.numbers["client"][0]: updates.terms for updates in made}, TreeSum[Summable]()
    for client in jobs.clients:
        total.add(place.get(client))
    return Updates.of([by_client[client] for client in jobs.clients], total.result() if total else None)


def train_stack(setup: Setup, broadcast: Broadcast, jobs: Jobs) -> Updates:
    """Run the rounds of clients that are alike in lockstep."""
    if len(jobs) == 1:
        return _one_by_one(JOBS["train"], setup, broadcast, jobs)
    try:
        samples = Several(setup.federation, jobs.clients)
        local = stack_view(setup, broadcast, jobs, samples, "model")
        return _updates(setup, jobs, local, _trained(setup, broadcast, local, samples))
    except DataError:
        return _one_by_one(JOBS["train"], setup, broadcast, jobs)
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        updates = _one_by_one(JOBS["train"], setup, broadcast, jobs)  # whose error would name the client
        _tell_apart(str(error).strip().split("\n")[0][:160])
        return updates


@cache
def _tell_apart(why: str) -> None:
    """Say once per reason that some clients do not fit into one stack."""
    log.warning("clients of some stacks train one by one, as their data do not fit together: %s", why)


class _Trained(NamedTuple):
    """The round of one client, or of a stack: for every client its loss, why it cannot be used, and its metrics."""

    losses: Sequence[float]
    failures: Sequence[str | None]
    delta: Tensor
    metrics: Sequence[dict[str, float]]
    seconds: float


def _trained(setup: Setup, broadcast: Broadcast, local: Local, samples: Sequence[Samples]) -> _Trained:
    """Run the round, from `begin` to the update that is sent."""
    start, method = time.perf_counter(), setup.method
    local.model.train()
    loop, delta, metrics = LocalLoop(setup, local, samples), EMPTY, [dict[str, float]()] * len(samples)
    for part in method.filling("begin"):
        part.begin(local)
    method.owner("train").train(local, loop.fit)
    losses, failures = zip(*loop.outcomes(), strict=True)
    if not all(failures):
        for part in method.filling("end"):
            part.end(local)
        check_states(local.states, "local.state(self)")
        check_states(local.sent, "what it sends")
        failures = tuple(old or new for old, new in zip(failures, _not_finite(local, broadcast), strict=True))
    if not all(failures):
        metrics = _client_metrics(setup, local, samples, failures)
        delta = _outgoing(setup, local, broadcast)
    return _Trained(losses, failures, delta, metrics, time.perf_counter() - start)


def _update(job: Job, local: Local, made: _Trained) -> Update:
    """What one client returns."""
    model, steps, weighted = local.model, cast(int, local.steps), cast(float, local.weighted_steps)
    plain = job.client, cast(int, local.samples), made.seconds, job.weight, steps, weighted, made.losses[0]
    if made.failures[0] is not None:
        return Update(*plain, made.failures[0])
    update = Update(*plain, None, made.metrics[0], delta=made.delta, sent=local.sent, states=local.states)
    if model.buffers.numel() or model.counters.numel():
        update.buffers, update.counters = model.buffers.clone(), model.counters.clone()
    return update


def _updates(setup: Setup, jobs: Jobs, local: Local, made: _Trained) -> Updates:
    """What the clients of a stack return."""
    sent, states = moved(local.sent, CPU), moved(local.states, CPU)
    delta, buffers, counters = (hosted(t) for t in (made.delta, local.model.buffers, local.model.counters))
    numbers = np.zeros(len(jobs), NUMBERS)
    numbers["client"], numbers["weight"] = jobs.clients, jobs.weights
    numbers["loss"], numbers["seconds"] = made.losses, made.seconds / len(jobs)
    for name in ("samples", "steps", "weighted_steps"):
        numbers[name] = hosted(getattr(local, name)).flatten().numpy()
    failures = {place: failure for place, failure in enumerate(made.failures) if failure is not None}
    terms, own = stacked_terms(setup, numbers, failures, delta, buffers, sent)
    for place, metrics in enumerate(made.metrics):
        if metrics and place not in failures:
            own.setdefault(place, {})["metrics"] = metrics
    if states or counters.numel():
        for place, (kept, count) in enumerate(zip(each_row(states, len(jobs)), counters.clone(), strict=True)):
            own.setdefault(place, {}).update({"states": kept} | ({"counters": count} if len(count) else {}))
    return Updates(numbers, failures, own, terms)


def _client_metrics(
    setup: Setup, local: Local, samples: Sequence[Samples], failures: Sequence[str | None]
) -> list[dict[str, float]]:
    """What the parts record for every client, and the time that took; they look at one client of a stack at a time."""
    parts, found = setup.method.filling("client_metrics"), list[dict[str, float]]()
    if not parts:
        return [{}] * len(samples)
    for place, (member, own, failure) in enumerate(zip(local.members, samples, failures, strict=True)):
        start, metrics = time.perf_counter(), dict[str, float]()
        if failure is not None:
            found.append(metrics)
            continue
        with nullcontext() if member is local else setup.model.loaded(member.theta, local.model.buffers[place]):
            for part in parts:
                metrics |= part.client_metrics(setup, member, own)
        found.append(metrics | {"watch_seconds": round(time.perf_counter() - start, 6)} if metrics else {})
    return found


def _outgoing(setup: Setup, local: Local, broadcast: Broadcast) -> Tensor:
    """The update as it is sent: without private coordinates, and as the parts change it."""
    # A stack's update takes the gradients' memory, which is still in the cache; the model of a single client goes on.
    delta = torch.sub(local.theta, local.origin, out=local.grad if local.count > 1 else None)
    if setup.private:
        _keep(setup, local, broadcast, delta)
    for part in setup.method.filling("upload"):
        delta = vector_like(part.upload(local, delta), local.theta, part.name, "upload")
        setup.private.hide(delta)
    return delta


def _keep(setup: Setup, local: Local, broadcast: Broadcast, delta: Tensor) -> None:
    """Store what stays with the client, and remove it from everything that is sent."""
    private, model = setup.private, local.model
    local.states[Private.KEY] = private.taken(model)
    private.hide(delta)
    for state in local.messages.values():
        for tensor in state.values():
            private.hide(tensor)
    model.buffers[..., private.buffers] = broadcast.buffers[private.buffers]
    model.counters[..., private.counters] = broadcast.counters[private.counters]


def _not_finite(local: Local, broadcast: Broadcast) -> list[str | None]:
    """What is not finite in each client's weights, statistics and messages; None: all is.

    An unchanged buffer, such as a mask of −∞, may be infinite.
    """
    buffers, count = local.model.buffers, local.count
    sums = [local.theta.sum()]
    if buffers.numel():
        sums.append(buffers.sum())
    sums += [tensor.sum() for state in local.sent.values() for tensor in state.values()]
    if all(map(math.isfinite, numbers(sums))):
        return [None] * count  # a finite sum has finite terms
    finite = {"its weights are": torch.isfinite(local.theta)}
    if buffers.numel():
        finite["its buffers are"] = torch.isfinite(buffers) | (buffers == broadcast.buffers)
    for part, state in local.sent.items():
        finite |= {f"the {name!r} that {part} sends is": torch.isfinite(t) for name, t in state.items()}
    rows = [on(fine.reshape(count, -1).all(1), local.theta.device) for fine in finite.values()]
    answers = torch.stack(rows).tolist()  # read once
    return [
        next((f"{what} not finite" for what, fine in zip(finite, answers, strict=True) if not fine[i]), None)
        for i in range(count)
    ]


@torch.no_grad()
def estimate(setup: Setup, broadcast: Broadcast, job: Job) -> Update:
    """BatchNorm statistics of the broadcast weights over a client's training data, without augmentation.

    All minibatches have the same weight. A last minibatch of one sample, which has no variance, is left out. If
    the data cannot be read, `failure` of the update says why, and nothing is added.
    """
    start, model, federation = time.perf_counter(), setup.model, setup.federation
    setup.receive(broadcast, job)
    samples = federation.samples(job.client)
    batches = list(torch.split(torch.arange(len(samples)), setup.experiment.batch_size or len(samples)))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches.pop()
    try:
        with averaging_statistics(model.module):
            for positions in batches:
                x, _ = samples.batch(positions)
                model(federation.preprocess(x, None, model.theta.dtype))
    except DataError as error:
        return Update(job.client, 0, 0.0, failure=f"its data cannot be read: {error}")
    finally:
        model.take_features()
    seconds = time.perf_counter() - start
    buffers, counters = model.buffers.clone(), model.counters.clone()
    return Update(job.client, len(samples), seconds, buffers=buffers, counters=counters)


JOBS = {
    "train": Kind(train, training_terms, train_together, trains=True),
    "estimate": Kind(estimate, estimated_terms),
    "evaluate": Kind(evaluate_client, lambda setup, updates: None, evaluate_together),
}
