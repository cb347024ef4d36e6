"""`Stack`: the rounds of several clients in lockstep, as the parts see them; and their minibatches as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core.devices import on
from fedflat.core.inputs import map_inputs
from fedflat.core.rows import Number
from fedflat.core.samples import IGNORED
from fedflat.core.stacked import StackedModel
from fedflat.core.tensors import State, States
from fedflat.core.views import Batch, Local


class Stack(Local):
    """Several clients' rounds as one `Local`: everything of a client's own has one row per client.

    Weights, gradients, states and messages are `[clients, …]`; `share`, `samples` and `steps` are columns
    `[clients, 1]`. A part whose formulas act on the last dimension works on it as it works on one client.
    `members` are the clients one by one, for draws from their own streams; their `theta` are rows of this `theta`.

    Args:
        model: The weights.
        clients: The clients' numbers.
        samples: Their numbers of samples.
        states: What they have kept, with one row per client.
        member: Makes the `Local` of one of them, given its place; called when somebody asks for it.
        origin: The weights that all of them received; None: each of them starts from its own, those in `model`.
    """

    def __init__(
        self,
        model: StackedModel,
        clients: Sequence[int],
        samples: Sequence[int],
        states: States,
        member: Callable[[int], Local],
        origin: Tensor | None = None,
    ) -> None:
        first = member(0)
        self.__dict__.update(vars(first))
        self.model, self.theta, self.grad, self.count = model, model.theta, model.grad, len(clients)
        self.origin = self.given = model.theta.clone() if origin is None else origin.expand(self.count, -1)
        self._numbers, self._held, self._member = clients, samples, member
        self.samples = self._column(samples)
        self.steps = self.weighted_steps = self.theta.new_zeros(self.count, 1)
        self.client = torch.from_numpy(np.array(clients)).unsqueeze(1)  # type: ignore[assignment]
        self.states, self.sent, self._scratch = states, {}, {}
        self._members: Sequence[Local] = ()
        common = first._received
        self._received = {part: {n: t.expand(self.count, *t.shape) for n, t in s.items()} for part, s in common.items()}

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.array(numbers)).to(self.theta).unsqueeze(1)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the clients."""
        return self._numbers

    @property
    def held(self) -> Sequence[int]:
        """How many samples the clients have."""
        return self._held

    @property
    def members(self) -> Sequence[Local]:
        """The clients one by one."""
        if not self._members:
            self._members = tuple(map(self._member, range(self.count)))
            rows = zip(self._members, self.theta, self.origin, self.given, strict=True)
            for member, theta, origin, given in rows:
                member.theta, member.origin, member.given = theta, origin, given
                member.start_branch(self.branch, self.only)
        return self._members

    @property
    def share(self) -> Number:
        """Relative sizes of the clients."""
        return self._column([float(member.share) for member in self.members])

    def start_branch(self, branch: str, only: Tensor | None = None) -> None:
        """See `Local.start_branch`."""
        super().start_branch(branch, only)
        for member in self._members:
            member.start_branch(branch, only)

    def take_batch(self, batch: Batch, sizes: Sequence[int]) -> None:
        """See `Local.take_batch`."""
        self.batch, self.active, self.running = batch, None, self.count
        moves = np.asarray(sizes) > 0
        if not moves.all():
            self.active = on(torch.from_numpy(moves), self.theta.device).unsqueeze(1)
            ends = np.flatnonzero(~moves)[0]
            self.running = self.count if moves[ends:].any() else int(ends)

    def take_rates(self, rates: Sequence[float]) -> None:
        """See `Local.take_rates`."""
        self.rate = rates[0] if len(set(rates)) == 1 else self._column(rates)

    def count_step(self) -> None:
        """See `Local.count_step`."""
        if self.branch == "global":
            taken = 1.0 if self.active is None else self.active
            self.steps, self.weighted_steps = self.steps + taken, self.weighted_steps + taken * self.rate


def stacked_states(states: Sequence[Mapping[str, State]]) -> States:
    """The states of clients that keep tensors of the same names and shapes, with one row per client."""
    first = states[0]
    return {part: {name: torch.stack([s[part][name] for s in states]) for name in first[part]} for part in first}


def joined(batches: Sequence[Batch], like: Tensor) -> Batch:
    """One minibatch of several clients: the first dimension is that of the clients.

    Shorter ones are filled up with zeros whose label is `IGNORED`, which the loss leaves out.
    Weights are tensors `like` the one given.
    """
    size = max(len(batch.targets[0][1]) for batch in batches)
    most = max(len(batch.targets) for batch in batches)
    targets = [batch.targets + ((0.0, batch.targets[0][1]),) * (most - len(batch.targets)) for batch in batches]
    return Batch(
        filled([batch.x for batch in batches], size, 0),
        tuple(
            (_weights([weight for weight, _ in column], like), filled([y for _, y in column], size, IGNORED))
            for column in zip(*targets, strict=True)
        ),
    )


def first(batch: Batch, count: int) -> Batch:
    """The minibatch of the first clients."""

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) else leaf

    return Batch(map_inputs(cut, batch.x), tuple((cut(weight), y[:count]) for weight, y in batch.targets))


def _weights(weights: Sequence[Number], like: Tensor) -> Number:
    return 1.0 if all(weight == 1.0 for weight in weights) else like.new_tensor(weights)


def filled(tensors: Sequence[Any], size: int, value: float) -> Any:
    """Inputs of the same structure as one, each filled up to `size` entries."""
    first = tensors[0]
    if isinstance(first, dict):
        return {key: filled([x[key] for x in tensors], size, value) for key in first}
    if isinstance(first, (list, tuple)):
        leaves = [filled(column, size, value) for column in zip(*tensors, strict=True)]
        return type(first)(*leaves) if hasattr(first, "_fields") else type(first)(leaves)
    if all(len(tensor) == size for tensor in tensors):
        return torch.stack(list(tensors))
    whole = first.new_full((len(tensors), size, *first.shape[1:]), value)
    for row, tensor in zip(whole, tensors, strict=True):
        row[: len(tensor)] = tensor
    return whole
