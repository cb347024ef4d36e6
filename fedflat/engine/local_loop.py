"""The local loop: the only place where a client trains, whatever the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core import streams
from fedflat.core.devices import numbers
from fedflat.core.gradients import backward
from fedflat.core.lockstep import Stack, first, joined, stacked_states
from fedflat.core.optimizer_choice import optimizer_of
from fedflat.core.part import Part
from fedflat.core.private import Private
from fedflat.core.rows import Number
from fedflat.core.samples import Samples
from fedflat.core.stacked import StackedModel
from fedflat.core.tensors import copied
from fedflat.core.views import Batch, Local
from fedflat.data.several import Several
from fedflat.engine.full_passes import FullPasses
from fedflat.engine.minibatches import Pair, lockstep, minibatches, pieces, planned_steps
from fedflat.engine.setup import Broadcast, Job, Jobs, Setup
from fedflat.errors import InputError
from fedflat.tasks.losses import row_losses

WITHIN = ("around_forward", "loss", "further_losses")
"""Slots of parts that act within one client's forward pass."""


def local_view(setup: Setup, broadcast: Broadcast, job: Job, origin: Tensor, samples: int) -> Local:
    """The client's round as the parts see it, before the first step."""
    return Local(
        setup.model,
        origin,
        experiment=setup.experiment,
        round=broadcast.round,
        client=job.client,
        clients=setup.clients,
        samples=samples,
        share=lambda: setup.share(job.client),
        lr=broadcast.lr,
        uniform=setup.uniform,
        optimizer=optimizer_of(setup.experiment),
        states=copied(job.states),
        received=broadcast.received,
        criterion=setup.criterion,
    )


def stack_view(setup: Setup, broadcast: Broadcast, jobs: Jobs, samples: Several, purpose: str) -> Stack:
    """The rounds of several clients that are `alike`, before the first step; `purpose` names the streams of dropout."""
    setup.load(broadcast)
    seed, private = setup.experiment.seed, setup.private

    def generators() -> list[torch.Generator]:
        return [streams.global_generator(seed, purpose, broadcast.round, client) for client in jobs.clients]

    model = StackedModel(setup.model, generators, len(jobs), setup.folds)
    thetas = [] if jobs.plain else [job.theta for job in jobs if job.theta is not None]
    if thetas:
        model.theta.copy_(torch.stack(thetas))
    states = {} if jobs.plain else stacked_states([job.states for job in jobs])
    if private:
        private.load(model, states.get(Private.KEY, {}))
    own, sizes = bool(private) or bool(thetas), samples.sizes

    def member(place: int) -> Local:
        return local_view(setup, broadcast, jobs[place], broadcast.theta, sizes[place])

    return Stack(model, jobs.clients, sizes, states, member, None if own else broadcast.theta)


def alike(setup: Setup, jobs: Jobs) -> list[Jobs]:
    """Jobs of clients that can be stacked: they keep states of the same names and shapes.

    Where shorter minibatches cannot be filled up, they have the same number of samples as well.
    """
    if setup.pads and jobs.plain:
        return [jobs] if len(jobs) else []
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        kept = [(part, name, tuple(t.shape)) for part, state in job.states.items() for name, t in state.items()]
        size = 0 if setup.pads else setup.federation.size(job.client)
        groups.setdefault((size, job.theta is None, *sorted(kept)), []).append(job)
    return [Jobs.of(group) for group in groups.values()]


PLAIN = Part()  # its gradient is that of the loss


class LocalLoop:
    """Minibatch steps in this order: batch, loss, gradient, corrections, clipping, the optimiser's step, constraints.

    Args:
        setup: The setup of the run.
        local: One client's round, or a `Stack` of several.
        samples: The data of each client.
    """

    def __init__(self, setup: Setup, local: Local, samples: Sequence[Samples]) -> None:
        self.setup, self.local, self.samples = setup, local, samples
        self._fill = setup.method.filling
        self._gradient = PLAIN.gradient
        self._corrections: Sequence[Part] = ()  # of the branch that is trained
        self._constraints: Sequence[Part] = ()
        self._step_loss: Tensor | None = None
        self._losses: list[tuple[Tensor, Number, Sequence[int], bool]] = []  # see `_record`
        self._fits = 0
        self._folds = setup.folds and local.count > 1 and not any(map(self._fill, WITHIN))
        local.shared = setup.private.shared if setup.private.theta.numel() else None
        passes = FullPasses(setup, samples)
        local.full_gradient, local.full_loss, local.label_counts = passes.gradient, passes.loss, passes.label_counts

    def outcomes(self) -> list[tuple[float, str | None]]:
        """For every client, the mean data loss over the samples seen, and why it diverged; None if it did not.

        A loss counts at the weights of the first forward pass of its step. The losses stay on the device until now:
        this is the only place that waits for them.
        """
        if not self._losses:
            return [(math.nan, None)] * len(self.samples)
        if len(self.samples) == 1:
            return [self._outcome(0, numbers([loss for loss, *_ in self._losses]))]
        table = torch.stack([loss for loss, *_ in self._losses]).double().cpu().numpy()
        sizes = np.array([sizes for _, _, sizes, _ in self._losses])
        if not np.isfinite(table[sizes > 0]).all():
            return [self._outcome(i, losses) for i, losses in enumerate(table.T.tolist())]
        counted = sizes * np.array([[counts] for *_, counts in self._losses])
        total, seen = np.where(counted > 0, table * counted, 0.0).sum(0), counted.sum(0)
        means = np.divide(total, seen, out=np.full(len(total), np.nan), where=seen > 0)
        return [(mean, None) for mean in means.tolist()]

    def _outcome(self, i: int, losses: list[float]) -> tuple[float, str | None]:
        total, seen = 0.0, 0
        for loss, (_, steps, sizes, counts) in zip(losses, self._losses, strict=True):
            if sizes[i] and not math.isfinite(loss):
                step = int(steps.reshape(-1)[i] if isinstance(steps, Tensor) else steps)
                return math.nan, f"its loss is {loss} at step {step}"
            if sizes[i] and counts:
                total, seen = total + loss * sizes[i], seen + sizes[i]
        return total / seen if seen else math.nan, None

    def fit(
        self,
        epochs: int | None = None,
        only: Tensor | None = None,
        branch: str = "global",
        steps: int | None = None,
    ) -> None:
        """Train from the current weights.

        Every call sees the same minibatches, so that two branches of a round can be compared.

        Args:
            epochs, steps: Replace those of the experiment.
            only: Mask of the coordinates to train; None: all.
            branch: Name of the trajectory, for parts that treat several trajectories differently.
        """
        local, owner = self.local, self.setup.method.owner("gradient")
        self._gradient = (PLAIN if owner.global_gradient and branch != "global" else owner).gradient
        local.start_branch(branch, only)
        self._corrections, self._constraints = self._here("correct_gradient"), self._here("constrain_weights")
        handed_over, self._fits = local.optimizer_state, self._fits + (branch == "global")
        if branch != "global" or self._fits > 1 or handed_over is None:  # a part may set the state of the first fit
            local.optimizer_state = local.start_optimizer()
        held = local.held
        counted = {size: planned_steps(self.setup.experiment, size, epochs, steps) for size in set(held)}
        planned = [counted[size] for size in held]
        rated = self._fill("step_rate")
        with local.model.restricted(only):
            for k, (batch, sizes) in enumerate(self._minibatches(planned)):
                if rated:
                    local.take_rates(
                        [_rate(rated, m, k, count) for m, count in zip(local.members, planned, strict=True)]
                    )
                self._step(batch, sizes)
        local.only, local.active, local.rate = None, None, 1.0
        if branch != "global":
            local.optimizer_state = handed_over

    def _minibatches(self, planned: Sequence[int]) -> Iterator[tuple[Batch, Sequence[int]]]:
        """The minibatch of every step, and how many samples of each client it has; 0: the client has finished."""
        local, parts, preprocess = self.local, self._fill("batch"), self.setup.federation.preprocess
        if local.count == 1:
            for x, y in self._pairs(local.client, self.samples[0], planned[0]):
                local.batch = Batch(x, ((1.0, y),))
                for part in parts:
                    local.batch = part.batch(local, local.batch)
                yield local.batch, (y.shape[0],)
            return
        together = cast(Several, self.samples)
        whole = None if parts else lockstep(local, together, planned, preprocess, self.setup.pads)
        if whole is not None:
            yield from whole
            return
        members = local.members
        clients = zip(members, self.samples, planned, strict=True)
        for pairs in zip_longest(*(self._pairs(member.client, own, steps) for member, own, steps in clients)):
            for member, pair in zip(members, pairs, strict=True):
                if pair is not None:  # otherwise it keeps its last one, whose gradient is not followed
                    member.batch = Batch(pair[0], ((1.0, pair[1]),))
                    for part in parts:
                        member.batch = part.batch(member, member.batch)
            batches = [member.batch for member in members]
            sizes = [0 if pair is None else len(pair[1]) for pair in pairs]
            yield joined(batches, local.theta), sizes

    def _pairs(self, client: int, samples: Samples, steps: int) -> Iterable[Pair]:
        """A client's minibatches; those that were made ahead are used once, since a network may change its inputs."""
        _, ahead = self.setup.ahead.pop(client, (None, None))
        if ahead is not None and len(ahead) == steps:
            return ahead
        return minibatches(self.setup, self.local.round, client, samples, steps)

    def _step(self, batch: Batch, sizes: Sequence[int]) -> None:
        local = self.local
        local.take_batch(batch, sizes)
        self._step_loss = None
        self._gradient(local, self.backward)
        self._record(sizes)
        if self._corrections:
            self._correct_gradient()
        local.descend(local.theta, local.grad, local.optimizer_state or {})
        if self._constraints:
            self._constrain_weights()
        local.count_step()

    def _here(self, slot: str) -> Sequence[Part]:
        """The parts that fill a slot and act on the current branch."""
        parts = self._fill(slot)
        return parts if self.local.branch == "global" else [part for part in parts if part.everywhere]

    def _correct_gradient(self) -> None:
        """Correct the gradient of the shared weights; private weights follow their own gradient."""
        private, grad = self.setup.private, self.local.grad
        own = grad[..., private.theta] if private else None
        for part in self._corrections:
            part.correct_gradient(self.local)
        if own is not None:
            grad[..., private.theta] = own

    def _constrain_weights(self) -> None:
        """Constrain the shared weights that are trained; the others must not change, not even by rounding."""
        theta, only, private = self.local.theta, self.local.only, self.setup.private
        free = private.shared if private else None
        for mask in (only, self.local.active):
            if mask is not None:
                free = mask.bool() if free is None else free & mask.bool()
        before = None if free is None else theta.clone()
        for part in self._constraints:
            part.constrain_weights(self.local)
        if free is not None and before is not None:
            torch.where(free, theta, before, out=theta)

    def backward(self, of: Callable[[Any], Tensor] | None = None) -> Tensor:
        """Loss of the current batch at the current weights; its gradient goes into `local.grad`.

        Args:
            of: A function of the model's output to differentiate instead of the loss and its terms.
        """
        local, size = self.local, self.setup.experiment.microbatch
        if self._folds and of is None:
            loss = of_data = self._folded(local.batch)
        else:
            local.grad.zero_()
            loss, of_data = self._pass(local.batch, of) if size is None else self._in_pieces(size, of)
        if self._step_loss is None:
            self._step_loss = of_data
        if local.only is not None:
            local.grad.mul_(local.only)
        return loss

    def _pass(self, batch: Batch, of: Callable[[Any], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """A forward and a backward pass, which adds to `local.grad`; returns the loss and the data loss."""
        loss, of_data = self.local.model.each(self._loss, batch, of)
        whole = loss if self.local.count == 1 else loss.sum()  # each client's gradient goes into its own row
        backward(whole)
        value = loss.detach()
        return value, value if of_data is loss else of_data.detach()

    def _folded(self, batch: Batch) -> Tensor:
        """A forward and a backward pass of a stack whose losses have no terms; returns the losses.

        Clients that have finished are left out, where they are the last ones; their gradients and losses are zero.
        """
        count, whole = self.local.running, cast(StackedModel, self.local.model)
        model, losses_of = whole.first(count), row_losses(self.setup.criterion)
        if model is not whole:
            batch = first(batch, count)
        output = model(batch.x)
        if len(batch.targets) == 1:
            loss = losses_of(output, batch.targets[0][1])
        else:
            loss = torch.stack([weight * losses_of(output, y) for weight, y in batch.targets]).sum(0)
        model.backpropagate(loss)
        if model is whole:
            return loss.detach()
        whole.grad[count:].zero_()
        return F.pad(loss.detach(), (0, whole.count - count))

    def _in_pieces(self, size: int, of: Callable[[Any], Tensor] | None) -> tuple[Tensor, Tensor]:
        """The same for a minibatch in pieces, one pass each; every gradient is weighted by its share of the targets."""
        if of is not None:
            who = self.setup.method.owner("gradient").name
            raise InputError(f"microbatch: {who} differentiates a function of the whole minibatch's output")
        grad, total = self.local.grad, torch.zeros_like(self.local.grad)
        losses = self.local.theta.new_zeros(2)
        for batch, share in pieces(self.local.batch, size):
            losses.add_(torch.stack(self._pass(batch)), alpha=share)
            total.add_(grad, alpha=share)
            grad.zero_()
        grad.copy_(total)
        return losses[0], losses[1]

    def _loss(self, batch: Batch, of: Callable[[Any], Tensor] | None) -> tuple[Tensor, Tensor]:
        """One client's loss of a minibatch with all terms, or another function `of` the output; and the data loss."""
        local, whole = self.local, self.local.batch
        local.batch = batch
        try:
            output = self._forward(batch.x)
            local.features = local.model.take_features()
            of_data = local.data_loss = local.loss_of(output)
            return self._with_terms(of_data, output) if of is None else of(output), of_data
        finally:
            local.batch = whole

    def _with_terms(self, loss: Tensor, output: Any) -> Tensor:
        """The loss with the terms of the parts; those that need passes of their own are differentiated here."""
        for part in self._fill("loss"):
            term = part.loss(self.local, output)
            loss = loss if term is None else loss + term
        for part in self._fill("further_losses"):
            for term in part.further_losses(self.local, output):
                term.backward()  # type: ignore[no-untyped-call]
        return loss

    def _record(self, sizes: Sequence[int]) -> None:
        """Keep the losses of a step with its number, the sizes of the minibatches, and whether the mean counts them."""
        if self._step_loss is not None:
            self._losses.append((self._step_loss, self.local.steps, sizes, self.local.branch == "global"))

    def _forward(self, x: Any) -> Any:
        """The model's output, inside what the parts put around it."""
        parts = self._fill("around_forward")
        if not parts:
            return self.local.model(x)
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.around_forward(self.local))
            return self.local.model(x)


def _rate(parts: Sequence[Part], local: Local, step: int, planned: int) -> float:
    return math.prod(part.step_rate(local, step, planned) for part in parts)
