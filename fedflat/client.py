"""The local loop: the only place where a client trains, whatever the method."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from fedflat import streams
from fedflat.data.federation import Samples
from fedflat.errors import ClientError, InputError
from fedflat.method import Batch, Local, Part, Update
from fedflat.private import Private
from fedflat.task import Criterion, Job, Task

BLOCK = 3 << 18  # numbers that are prepared at once: enough to spread fixed costs, few enough for a cache


class DivergedError(ArithmeticError):
    """Local training left the finite numbers."""


def train(task: Task, job: Job) -> Update:
    """Run one client's round. A client that diverges returns an update whose `failure` says where."""
    start = time.perf_counter()
    model = task.model
    origin = task.receive(job)
    model.module.train()
    local: Local | None = None
    failure, figures, delta = None, dict[str, float](), torch.empty(0)
    try:
        with streams.isolated(task.experiment.seed, "model", job.round, job.client):
            samples = task.federation.samples(job.client)
            local = local_view(task, job, origin, len(samples))
            loop = LocalLoop(task, local, samples)
            for part in task.method.filling("begin"):
                part.begin(local)
            task.method.owner("train").train(local, loop.fit)
            for part in task.method.filling("end"):
                part.end(local)
            _check_finite(local, job)
            figures = _observed(task, local, samples)
            delta = _outgoing(task, local, job)
    except DivergedError as error:
        failure = str(error)
    except InputError:
        raise
    except Exception as error:
        step = local.steps if local else None
        raise ClientError(job.round, job.client, step, traceback.format_exc()) from error
    assert local is not None
    return Update(
        client=job.client,
        samples=local.samples,
        weight=job.weight,
        steps=local.steps,
        loss=loop.mean_loss,
        seconds=time.perf_counter() - start,
        delta=delta,
        buffers=model.buffers.clone(),
        counters=model.counters.clone(),
        sent=local.sent,
        states=local.states,
        failure=failure,
        figures=figures,
    )


def _observed(task: Task, local: Local, samples: Samples) -> dict[str, float]:
    """What the method's observers see, and how long they looked."""
    start, figures = time.perf_counter(), dict[str, float]()
    for part in task.method.filling("observe"):
        figures |= part.observe(task, local, samples)
    return figures | {"watch_seconds": round(time.perf_counter() - start, 6)} if figures else {}


def _outgoing(task: Task, local: Local, job: Job) -> Tensor:
    """The update as it is sent: without what stays with the client, and as the parts change it."""
    delta = local.theta - local.origin
    if task.private:
        _keep(task, local, job, delta)
    for part in task.method.filling("upload"):
        delta = part.upload(local, delta)
        task.private.hide(delta)
    return delta


def _keep(task: Task, local: Local, job: Job, delta: Tensor) -> None:
    """Store what stays with the client, and take it out of all that is sent."""
    private, model = task.private, task.model
    local.states[Private.KEY] = private.taken(model)
    private.hide(delta)
    for part in task.method.parts:
        if not part.bookkeeping:
            for tensor in local.sent.get(part.name, {}).values():
                private.hide(tensor)
    model.buffers[private.buffers] = job.buffers[private.buffers]
    model.counters[private.counters] = job.counters[private.counters]


def local_view(task: Task, job: Job, origin: Tensor, samples: int) -> Local:
    """The client's round as the parts see it, before its first step."""
    return Local(
        task.model,
        origin,
        experiment=task.experiment,
        round=job.round,
        client=job.client,
        clients=task.clients,
        samples=samples,
        share=lambda: task.share(job.client),
        lr=job.lr,
        uniform=task.uniform,
        states=job.states,
        received=job.received,
    )


def _check_finite(local: Local, job: Job) -> None:
    """Refuse weights, statistics or messages that are not finite (a mask of −∞ among the buffers is as received)."""
    buffers = local.model.buffers
    if not bool(torch.isfinite(local.theta).all()):
        raise DivergedError("its weights are not finite")
    if not bool((torch.isfinite(buffers) | (buffers == job.buffers)).all()):
        raise DivergedError("its buffers are not finite")
    for part, state in local.sent.items():
        for name, tensor in state.items():
            if not bool(torch.isfinite(tensor).all()):
                raise DivergedError(f"the {name!r} that {part} sends is not finite")


class LocalLoop:
    """Minibatch steps in the order that spec §1.3 fixes: loss, gradient, corrections, clip, SGD, constraint."""

    def __init__(self, task: Task, local: Local, samples: Samples) -> None:
        self.task, self.local, self.samples = task, local, samples
        self._fill = task.method.filling
        self._gradient = task.method.owner("gradient").gradient
        self._loss_sum, self._loss_count, self._step_loss, self._fits = 0.0, 0, math.nan, 0
        local.full_gradient = self.full_gradient

    @property
    def mean_loss(self) -> float:
        """Mean data loss over the samples seen, each at the weights it was first met with."""
        return self._loss_sum / self._loss_count if self._loss_count else math.nan

    def fit(
        self,
        epochs: int | None = None,
        only: Tensor | None = None,
        branch: str = "global",
        steps: int | None = None,
    ) -> None:
        """Train from the current weights.

        epochs, steps: instead of the experiment's. only: a mask, to train these coordinates and no others.
        branch: name of the trajectory, for parts that treat several differently.
        Every call sees the same minibatches, so that two branches of a round can be compared.
        """
        local = self.local
        local.start_branch(branch, only)
        handed_over, self._fits = local.velocity, self._fits + (branch == "global")
        if branch != "global" or self._fits > 1 or handed_over is None:  # a part may hand a momentum to the first fit
            local.velocity = local.fresh_velocity()
        with local.model.restricted(only):
            for x, y in self._batches(epochs, steps):
                self._step(x, y)
        local.only = None
        if branch != "global":
            local.velocity = handed_over

    def _step(self, x: Any, y: Tensor) -> None:
        local = self.local
        local.batch = Batch(x, ((1.0, y),))
        for part in self._fill("batch"):
            local.batch = part.batch(local, local.batch)
        self._step_loss = math.nan
        self._gradient(local, self.evaluate)
        self._record(len(y))
        self._correct()
        local.descend(local.theta, local.grad, local.velocity)
        self._constrain()
        local.steps += local.branch == "global"

    def _here(self, slot: str) -> Iterator[Part]:
        return (part for part in self._fill(slot) if self.local.branch == "global" or part.everywhere)

    def _correct(self) -> None:
        """Drift is measured against what the clients share: what is a client's own follows its own gradient."""
        private, grad = self.task.private, self.local.grad
        own = grad[private.theta] if private else None
        for part in self._here("correct"):
            part.correct(self.local)
        if own is not None:
            grad[private.theta] = own

    def _constrain(self) -> None:
        """Constrain what is shared and trained; the rest must not move by a rounding error either."""
        parts, theta, only = list(self._here("constrain")), self.local.theta, self.local.only
        if not parts:
            return
        private = self.task.private
        free = private.shared if private else None
        if only is not None:
            free = only.bool() if free is None else free & only.bool()
        before = None if free is None else theta.clone()
        for part in parts:
            part.constrain(self.local)
        if free is not None and before is not None:
            torch.where(free, theta, before, out=theta)

    def evaluate(self) -> Tensor:
        """Loss of the current batch at the current weights, and its gradient in what is trained, into `local.grad`."""
        local = self.local
        local.grad.zero_()
        with self._watched():
            output = local.model(local.batch.x)
        local.features = local.model.take_features()
        loss = local.data_loss = data_loss(self.task.criterion, output, local.batch)
        if math.isnan(self._step_loss):
            self._step_loss = loss.item()
        for part in self._fill("loss"):
            term = part.loss(local, output)
            loss = loss if term is None else loss + term
        loss.backward()  # type: ignore[no-untyped-call]
        if local.only is not None:
            local.grad.mul_(local.only)
        return loss.detach()

    def full_gradient(self, at: Tensor) -> Tensor:
        """Gradient of the mean data loss over all of the client's samples at the weights `at`, without augmentation."""
        local, task, count = self.local, self.task, len(self.samples)
        total = torch.zeros_like(local.theta)
        with local.model.loaded(at):
            for chunk in torch.split(torch.arange(count), task.experiment.batch_size or count):
                x, y = self.samples.batch(chunk)
                local.grad.zero_()
                output = local.model(task.federation.preprocess(x, None, local.theta.dtype))
                task.criterion(output, y).backward()  # type: ignore[no-untyped-call]
                total.add_(local.grad, alpha=len(chunk) / count)
        return total

    def _batches(self, epochs: int | None, steps: int | None) -> Iterator[tuple[Any, Tensor]]:
        task, local, count = self.task, self.local, len(self.samples)
        experiment = task.experiment
        order = streams.torch_stream(experiment.seed, "batches", local.round, local.client)
        augment = streams.torch_stream(experiment.seed, "augment", local.round, local.client)
        sizes = minibatch_sizes(count, experiment.batch_size, experiment.drop_last)
        if not sizes:
            raise InputError(
                f"client {local.client} has {count} samples, fewer than batch_size={experiment.batch_size}, and "
                "drop_last leaves none: lower batch_size or unset drop_last"
            )
        if steps is None and epochs is None:
            steps = experiment.local_steps
        if steps is None:
            steps = len(sizes) * (experiment.local_epochs if epochs is None else epochs)
        while steps > 0:
            shuffled = torch.randperm(count, generator=order)
            yield from self._prepared(torch.split(shuffled[: sum(sizes)], sizes)[:steps], augment)
            steps -= len(sizes)

    def _prepared(self, batches: tuple[Tensor, ...], augment: torch.Generator) -> Iterator[tuple[Any, Tensor]]:
        """Inputs and labels of the batches of positions; several small batches are prepared in one go."""
        done, group = 0, 1
        while done < len(batches):
            now = batches[done : done + group]
            x, y = self.samples.batch(torch.cat(now))
            x = self.task.federation.preprocess(x, augment, self.local.theta.dtype)
            done += len(now)
            if len(now) == 1:
                if isinstance(x, Tensor):
                    group = max(1, BLOCK // max(1, x.numel()))
                yield x, y
            else:
                lengths = [len(batch) for batch in now]
                yield from zip(torch.split(x, lengths), torch.split(y, lengths), strict=True)

    def _record(self, count: int) -> None:
        if not math.isfinite(self._step_loss):
            raise DivergedError(f"its loss is {self._step_loss} at step {self.local.steps}")
        if self.local.branch == "global":
            self._loss_sum += self._step_loss * count
            self._loss_count += count

    def _watched(self) -> AbstractContextManager[Any]:
        watchers = self._fill("watch")
        if not watchers:
            return nullcontext()
        stack = ExitStack()
        for part in watchers:
            stack.enter_context(part.watch(self.local))
        return stack


def data_loss(criterion: Criterion, output: Any, batch: Batch) -> Tensor:
    """Mean loss of a batch, over its weighted labels where samples are mixed."""
    if len(batch.targets) == 1:
        return criterion(output, batch.targets[0][1])
    return torch.stack([weight * criterion(output, y) for weight, y in batch.targets]).sum()


def minibatch_sizes(count: int, batch_size: int, drop_last: bool) -> list[int]:
    """Sizes of the minibatches of one epoch.

    >>> minibatch_sizes(7, 3, drop_last=False)
    [3, 3, 1]
    """
    size = batch_size or count
    sizes = [size] * (count // size)
    return sizes if drop_last or count % size == 0 else [*sizes, count % size]
