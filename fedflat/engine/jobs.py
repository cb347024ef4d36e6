"""The jobs of a client: train, estimate statistics, evaluate.

Most tensors of an update are only summed. They are its `terms`: a worker may add those of several clients.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.batchnorm import averaging_statistics
from fedflat.core.devices import CPU, hosted, moved, numbers, on
from fedflat.core.private import Private
from fedflat.core.rows import Number, norms
from fedflat.core.samples import Samples
from fedflat.core.sums import Terms
from fedflat.core.tensors import State
from fedflat.core.views import EMPTY, Local, Update
from fedflat.engine.evaluation import evaluate_client, evaluate_together
from fedflat.engine.faults import check_states, vector_like
from fedflat.engine.local_loop import LocalLoop, alike, local_view, stack_view
from fedflat.engine.placement import explaining_memory
from fedflat.engine.setup import Broadcast, Job, Setup
from fedflat.errors import ClientError, DataError, InputError, RunError

DELTA, BUFFERS = "delta", "buffers"
"""Terms: updates weighted by `Update.weight`, statistics weighted by samples. Those of a part are `part/name`."""


class Kind(NamedTuple):
    """One kind of job.

    Attributes:
        work: Runs where the client's data are.
        terms: Sets the `terms` of updates; runs where terms are added. The first usable update has the sum.
        together: Does the work of several clients at once; None: they are done one by one.
    """

    work: Callable[[Setup, Broadcast, Job], Update]
    terms: Callable[[Setup, Sequence[Update]], Sequence[Update]]
    together: Callable[[Setup, Broadcast, Sequence[Job]], list[Update]] | None = None


def run_jobs(setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]) -> list[Update]:
    """Do the jobs of clients, all of one kind.

    If clients are stacked, the result depends on which ones are given together.
    """
    with explaining_memory(setup, f"{named(jobs)} in round {broadcast.round}"):
        if setup.device != CPU:
            broadcast, jobs = broadcast.on(setup.device), [job.on(setup.device) for job in jobs]
        return _unseeded(setup, broadcast, jobs) or _done(setup, broadcast, jobs)


def _unseeded(setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]) -> list[Update]:
    """The jobs done without seeds for the global generators, which most clients never use.

    If anything has drawn from these generators, the result does not count and is empty: now it is known that they must
    be seeded for every client.
    """
    if setup.draws:
        return []
    before, updates = streams.global_states(), list[Update]()
    try:
        setup.draws = False
        updates = _done(setup, broadcast, jobs)
    except Exception:
        if streams.global_states() == before:
            raise
    finally:
        setup.draws = None if streams.global_states() == before else True
    return [] if setup.draws else updates


def _done(setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]) -> list[Update]:
    kind = JOBS[jobs[0].kind]
    if setup.stack > 1 and len(jobs) > 1 and kind.together is not None:
        return list(kind.terms(setup, kind.together(setup, broadcast, jobs)))
    updates = (kind.work(setup, broadcast, job).hosted() for job in jobs)
    return [told for update in updates for told in kind.terms(setup, [update])]


def named(jobs: Sequence[Job]) -> str:
    """The clients of jobs, for messages."""
    return ("client " if len(jobs) == 1 else "clients ") + ", ".join(str(job.client) for job in jobs)


def train(setup: Setup, broadcast: Broadcast, job: Job) -> Update:
    """Run one client's round. If it diverges, or its data cannot be read, `failure` of the update says where."""
    setup.seed_global("model", broadcast.round, job.client)
    origin, local = setup.receive(broadcast, job), None
    try:
        samples = setup.federation.samples(job.client)
        local = local_view(setup, broadcast, job, origin, len(samples))
        return _trained(setup, broadcast, [job], local, [samples])[0]
    except DataError as error:  # a damaged file of one client must not end the run
        return Update(job.client, setup.federation.size(job.client), 0.0, failure=f"its data cannot be read: {error}")
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        step = int(local.steps) if local else None
        raise ClientError(broadcast.round, job.client, step, traceback.format_exc()) from error


def train_together(setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]) -> list[Update]:
    """Run the rounds of several clients, in lockstep where they are alike."""
    updates: dict[int, Update] = {}
    for group in alike(setup, jobs):
        for update in train_stack(setup, broadcast, group):
            updates[update.client] = update
    return [updates[job.client] for job in jobs]


def train_stack(setup: Setup, broadcast: Broadcast, jobs: Sequence[Job]) -> list[Update]:
    """Run the rounds of clients that are alike in lockstep."""
    if len(jobs) == 1:
        return [train(setup, broadcast, jobs[0])]
    try:
        samples = [setup.federation.samples(job.client) for job in jobs]
        return _trained(setup, broadcast, jobs, stack_view(setup, broadcast, jobs, samples, "model"), samples)
    except DataError:
        return [train(setup, broadcast, job) for job in jobs]
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        for job in jobs:  # one by one, so that the error names the client
            train(setup, broadcast, job)
        raise RunError(
            f"round {broadcast.round}, {named(jobs)} in a stack: {error}. Each of them trains alone: set stack=1"
        ) from error


def _trained(
    setup: Setup, broadcast: Broadcast, jobs: Sequence[Job], local: Local, samples: Sequence[Samples]
) -> list[Update]:
    """The round of one client, or of a stack of clients, from `begin` to the update."""
    start, method, model = time.perf_counter(), setup.method, local.model
    model.train()
    loop, delta, metrics = LocalLoop(setup, local, samples), EMPTY.expand(len(jobs), 0), dict[str, float]()
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
        metrics = _client_metrics(setup, local, samples)
        delta = _outgoing(setup, local, broadcast)
    rows = _Rows(local)
    steps, weighted = rows.numbers(local.steps), rows.numbers(local.weighted_steps)
    deltas, buffers, counters = (rows.of(hosted(t)) for t in (delta, model.buffers.clone(), model.counters.clone()))
    sent, states = moved(local.sent, CPU), moved(local.states, CPU)  # of a stack, in one piece
    seconds = (time.perf_counter() - start) / len(jobs)
    return [
        Update(
            client=job.client,
            samples=len(samples[i]),
            weight=job.weight,
            steps=int(steps[i]),
            weighted_steps=weighted[i],
            loss=losses[i],
            seconds=seconds,
            delta=deltas[i],
            buffers=buffers[i],
            counters=counters[i],
            sent=rows.taken(sent, i),
            states=rows.taken(states, i),
            failure=failures[i],
            metrics=metrics,
        )
        for i, job in enumerate(jobs)
    ]


class _Rows:
    """The entries of the clients of a `Local`: the rows of a stack, or the one client's tensors as they are."""

    def __init__(self, local: Local) -> None:
        self.many = local.count > 1

    def of(self, tensor: Tensor) -> Sequence[Tensor]:
        """One tensor per client."""
        return tensor.unbind() if self.many else [tensor]

    def numbers(self, number: Number) -> list[float]:
        """One number per client."""
        return number.flatten().tolist() if isinstance(number, Tensor) else [number]

    def taken(self, states: dict[str, State], i: int) -> dict[str, State]:
        """Client i's tensors."""
        if not self.many:
            return states
        return {part: {name: tensor[i] for name, tensor in state.items()} for part, state in states.items()}


def _client_metrics(setup: Setup, local: Local, samples: Sequence[Samples]) -> dict[str, float]:
    """What the parts record for the client, and the time that took; such parts do not stack."""
    start, metrics = time.perf_counter(), dict[str, float]()
    for part in setup.method.filling("client_metrics"):
        metrics |= part.client_metrics(setup, local, samples[0])
    return metrics | {"watch_seconds": round(time.perf_counter() - start, 6)} if metrics else {}


def _outgoing(setup: Setup, local: Local, broadcast: Broadcast) -> Tensor:
    """The update as it is sent: without private coordinates, and as the parts change it."""
    delta = local.theta - local.origin
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
    sums = [local.theta, *([buffers] if buffers.numel() else []), *(t for s in local.sent.values() for t in s.values())]
    if all(map(math.isfinite, numbers([t.sum() for t in sums]))):
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


def training_terms(setup: Setup, updates: Sequence[Update]) -> Sequence[Update]:
    """The updates with their terms; `delta` itself is kept only if a part regroups or combines updates."""
    usable = [update for update in updates if update.failure is None]
    whole = bool(setup.method.filling("combine") or setup.method.filling("regroup"))
    if usable:
        deltas = _matrix([update.delta for update in usable])
        sent = [usable[0].sent.get(part.name, {}) for part in setup.parts if not part.simulation_only]
        floats = setup.floats(sent)
        for update, (norm,) in zip(usable, norms(deltas).tolist(), strict=True):
            update.norm, update.floats = norm, floats
        usable[0].terms = terms = _statistics(usable)
        for part, state in usable[0].sent.items():
            for name in state:
                terms[f"{part}/{name}"] = _matrix([update.sent[part][name] for update in usable]).sum(0)
        if not whole:
            terms[DELTA] = _weighted([update.weight for update in usable], deltas)
    for update in updates:
        keep = update.failure is None and whole
        _drop_vectors(update, keep)
    return updates


def _weighted(weights: Sequence[float], rows: Tensor) -> Tensor:
    """The weighted sum of the rows."""
    return rows[0] * weights[0] if len(rows) == 1 else rows.new_tensor(weights) @ rows


def _matrix(rows: Sequence[Tensor]) -> Tensor:
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))


@torch.no_grad()
def estimate(setup: Setup, broadcast: Broadcast, job: Job) -> Update:
    """BatchNorm statistics of the broadcast weights over a client's training data, without augmentation.

    All minibatches have the same weight. A last minibatch of one sample, which has no variance, is left out.
    """
    start, model, federation = time.perf_counter(), setup.model, setup.federation
    setup.receive(broadcast, job)
    samples = federation.samples(job.client)
    batches = list(torch.split(torch.arange(len(samples)), setup.experiment.batch_size or len(samples)))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches.pop()
    with averaging_statistics(model.module):
        for positions in batches:
            x, _ = samples.batch(positions)
            model(federation.preprocess(x, None, model.theta.dtype))
    model.take_features()
    seconds = time.perf_counter() - start
    buffers, counters = model.buffers.clone(), model.counters.clone()
    return Update(job.client, len(samples), seconds, buffers=buffers, counters=counters)


def _statistics(updates: Sequence[Update]) -> Terms:
    if not updates[0].buffers.numel():
        return Terms()
    buffers = _matrix([update.buffers for update in updates]).double()
    return Terms({BUFFERS: _weighted([update.samples for update in updates], buffers)})


def _estimated(setup: Setup, updates: Sequence[Update]) -> Sequence[Update]:
    updates[0].terms = _statistics(updates)
    for update in updates:
        _drop_vectors(update)
    return updates


def _drop_vectors(update: Update, keep_delta: bool = False) -> None:
    """Forget the tensors that are only summed."""
    update.buffers = EMPTY
    if not keep_delta:
        update.delta, update.sent = EMPTY, {}


JOBS = {
    "train": Kind(train, training_terms, train_together),
    "estimate": Kind(estimate, _estimated),
    "evaluate": Kind(evaluate_client, lambda setup, updates: updates, evaluate_together),
}
