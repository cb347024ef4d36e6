"""The interface of a back end, and what every one of them computes in the same way."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from fedflat import streams
from fedflat.errors import ClientError, FedflatError, InputError, RunError
from fedflat.method import State, Update
from fedflat.scoring import CHUNK, Score, assess, pieces
from fedflat.statistics import using_batch
from fedflat.task import Job, Task, load_weights

Split = Literal["test", "client_test", "train"]


@dataclass
class Broadcast:
    """What goes to every participant of a round."""

    round: int
    lr: float
    theta: Tensor
    buffers: Tensor
    counters: Tensor
    received: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass
class Order:
    """One client's turn: its share of the combined update, its state as kept so far, and what it is asked to do.

    theta: weights for this client alone, instead of the broadcast ones.
    """

    client: int
    weight: float
    states: Mapping[str, State]
    duty: str = "train"
    theta: Tensor | None = None

    def job(self, broadcast: Broadcast, states: dict[str, State]) -> Job:
        """The complete job, with states that may be written to."""
        b = broadcast
        theta = b.theta if self.theta is None else self.theta
        return Job(b.round, self.client, b.lr, self.weight, theta, b.buffers, b.counters, b.received, states, self.duty)


@dataclass(frozen=True)
class Chunk:
    """A piece of evaluation: samples start…stop of a split (of one client, or of the federation's test set)."""

    split: Split
    client: int
    start: int
    stop: int


class Backend(Protocol):
    """Runs clients. Results come back in the order of the orders, whoever computes them."""

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """Have the clients do their duties. An update is the caller's, but its states only until the next is asked for.

        A back end may add the `shares` of clients that follow each other; see `Update`.
        """

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """Score the broadcast weights on each chunk."""

    def close(self) -> None:
        """Release what the back end holds."""


def chunks_of(count: int, split: Split, client: int = -1) -> list[Chunk]:
    """Cut `count` samples into pieces whose borders depend on nothing else, so that sums have one order."""
    return [Chunk(split, client, low, high) for low, high in pieces(0, count, CHUNK)]


def score_chunk(task: Task, chunk: Chunk) -> Score:
    """Score the model's current weights on one chunk."""
    federation, samples = task.federation, None
    if chunk.split == "test":
        samples = federation.test
    elif chunk.split == "client_test":
        samples = federation.client_test(chunk.client)
    else:
        samples = federation.samples(chunk.client)
    if samples is None:
        return Score()
    try:
        with streams.isolated(task.experiment.seed, "evaluation", chunk.start, chunk.client):
            # Statistics that stay with the clients are nobody's on common data: there the batch's own serve.
            aside = task.private.names if chunk.split == "test" else frozenset()
            with using_batch(task.model.module, aside):
                return assess(task, samples, chunk.start, chunk.stop)
    except Exception as error:
        raise RunError(f"evaluation failed: {type(error).__name__}: {error}") from error


def portable(error: Exception, doing: str) -> FedflatError:
    """The error that a worker has just met, in a form that can be sent. doing: what it was asked for."""
    if isinstance(error, (ClientError, RunError)):
        return error
    if isinstance(error, InputError):
        return InputError(str(error))
    return RunError(f"a worker failed at {doing!r}:\n{traceback.format_exc()}")


def load(task: Task, broadcast: Broadcast) -> None:
    """Put the broadcast weights and buffers into the task's model."""
    load_weights(task.model, broadcast.theta, broadcast.buffers, broadcast.counters)
