"""The two messages of a job: what the server asks of a client, and what the client answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedflat.core.tensors import State, flatten, nest
from fedflat.core.views import Update
from fedflat.engine.evaluation import KEY, MODELS
from fedflat.engine.setup import Broadcast, Job
from fedflat.flower import validation
from fedflat.flower.validation import Form, RefusedError

VECTORS = ("delta", "buffers", "counters")
RATES = 10.0  # no part raises the learning rate of its steps by more than this
SCORES: validation.Kind = (2,), torch.float64


def evaluated_form(sums: Mapping[str, tuple[int, ...]]) -> Form:
    """What a client that is evaluated sends: scores of the models that it has. sums: shapes by `Metric.key`."""
    kinds = {f"sent/{KEY}/{model}": SCORES for model in MODELS}
    kinds |= {f"sent/{KEY}/{model}/{key}": (shape, torch.float64) for model in MODELS for key, shape in sums.items()}
    return Form(kinds, frozenset(kinds))


@dataclass(frozen=True)
class Instruction:
    """What a client is asked for, beside tensors.

    Attributes:
        run: Whose state the client goes on from.
        kind: Of the job; see `engine.jobs.JOBS`.
        share: ω_i, the client's relative size.
        classes: How many the model tells apart; 0 where targets are no classes.
        kept: The round of the state that it goes on from, 0 for none.
    """

    run: str
    round: int
    client: int
    kind: str
    lr: float
    share: float
    classes: int
    kept: int


def common(broadcast: Broadcast) -> ArrayRecord:
    """What goes to all clients."""
    vectors = {"theta": broadcast.theta, "buffers": broadcast.buffers, "counters": broadcast.counters}
    return validation.arrays(vectors | flatten({"received": broadcast.received}))


def request(instruction: Instruction, shared: ArrayRecord, job: Job) -> RecordDict:
    """The server's message."""
    content = RecordDict({"instruction": ConfigRecord(asdict(instruction)), "common": shared})
    if job.theta is not None:
        content["own"] = validation.arrays({"theta": job.theta})
    return content


def instruction_of(content: RecordDict) -> Instruction:
    """What the server's message asks for."""
    return Instruction(**validation.values(content, "instruction"))


def nonce_of(content: RecordDict) -> bytes:
    """What the server's hello asks a client to sign."""
    nonce = validation.values(content, "hello").get("nonce")
    if not isinstance(nonce, bytes):
        raise RefusedError("sent a hello without a nonce")
    return nonce


def received(content: RecordDict, states: dict[str, State]) -> tuple[Broadcast, Job]:
    """The job in the server's message, given what the client has kept."""
    asked, tensors = instruction_of(content), validation.tensors(content, "common")
    vectors = {name: tensors.pop(name) for name in ("theta", "buffers", "counters")}
    broadcast = Broadcast(asked.round, asked.lr, **vectors, received=nest(tensors, 3).get("received", {}))
    theta = validation.tensors(content, "own")["theta"] if "own" in content else None
    return broadcast, Job(asked.client, asked.kind, states=states, theta=theta)


def tensors_of(update: Update) -> dict[str, Tensor]:
    """The tensors of an update by name."""
    vectors = {name: getattr(update, name) for name in VECTORS if getattr(update, name).numel()}
    return vectors | flatten({"sent": update.sent})


def told_of(update: Update, instruction: Instruction, kept: int) -> dict[str, Any]:
    """What a client tells beside tensors and its loss: of which round, how much work it was, why it failed."""
    told: dict[str, Any] = {"round": instruction.round, "client": instruction.client, "kept": kept}
    told |= {"steps": update.steps, "weighted_steps": update.weighted_steps, "seconds": float(update.seconds)}
    return told if update.failure is None else told | {"failure": update.failure}


def reply(update: Update, instruction: Instruction, kept: int) -> RecordDict:
    """The client's message. kept: of which round its state is now."""
    told = told_of(update, instruction, kept) | {"loss": float(update.loss)}
    if update.failure is not None:
        return RecordDict({"told": ConfigRecord(told)})
    metrics = ConfigRecord({name: float(value) for name, value in update.metrics.items()})
    return RecordDict({"told": ConfigRecord(told), "metrics": metrics, "update": validation.arrays(tensors_of(update))})


@dataclass(frozen=True)
class Expected:
    """What a client may send: its tensors, the names of its metrics, and the most steps that it can have made."""

    form: Form
    metrics: frozenset[str] = frozenset()
    steps: int = 0


def read_reply(content: RecordDict, instruction: Instruction, expected: Expected, like: Tensor) -> Update:
    """The update in a client's message, or an error that says why it cannot be used. like: the buffers as sent."""
    update = read_told(content, instruction, expected.steps)
    tensors: dict[str, Any] = {**validation.tensors(content, "update", expected.form)}
    for name, tensor in tensors.items():
        validation.check_range(name, tensor, like if name == "buffers" else None)
    vectors = {name: tensors.pop(name) for name in VECTORS if name in tensors}
    sent = nest(tensors, 3).get("sent", {})
    return replace(
        update,
        loss=validation.real(validation.values(content, "told"), "loss", nan=True),
        sent={KEY: {}} | sent if instruction.kind == "evaluate" else sent,
        metrics=_metrics(content, expected.metrics),
        **vectors,
    )


def read_told(content: RecordDict, instruction: Instruction, steps: int) -> Update:
    """What a client tells of its round, as an update without tensors. steps: the most that it can have made."""
    told = validation.values(content, "told")
    if (validation.whole(told, "round"), validation.whole(told, "client")) != (instruction.round, instruction.client):
        raise RefusedError(f"answered for round {told['round']} and client {told['client']}")
    if "failure" in told:
        raise RefusedError(f"failed: {validation.text(told, 'failure')}")
    kept = validation.whole(told, "kept")
    if kept not in (0, instruction.kept, instruction.round):
        raise RefusedError(f"kept a state of round {kept}")
    return Update(
        instruction.client,
        0,
        validation.real(told, "seconds", low=0.0),
        steps=validation.whole(told, "steps", high=steps),
        weighted_steps=validation.real(told, "weighted_steps", low=0.0, high=RATES * steps),
        states=stub(kept),
    )


def _metrics(content: RecordDict, known: frozenset[str]) -> dict[str, float]:
    record = validation.values(content, "metrics")
    if set(record) - known:
        raise RefusedError("sent metrics that nobody asked for")
    return {name: validation.real(record, name, nan=True) for name in record}


def stub(kept: int) -> dict[str, State]:
    """What the server keeps for a client: the round of the state that the client has, and nothing of it."""
    return {"flower": {"kept": torch.tensor([kept])}} if kept else {}


def kept_of(states: Mapping[str, State]) -> int:
    """The round in a stub; 0 for a client that keeps nothing."""
    return int(states["flower"]["kept"]) if states else 0


def failed(client: int, why: str) -> Update:
    """An update that cannot be used."""
    return Update(client, 0, 0.0, loss=math.nan, failure=why)
