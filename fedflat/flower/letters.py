"""The two letters of a visit: what the server asks of a client, and what the client answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedflat.backends.base import Broadcast, Order
from fedflat.examine import KEY, MODELS
from fedflat.flower import wire
from fedflat.flower.wire import Form, RefusedError
from fedflat.method import State, Update
from fedflat.store import flatten, nest
from fedflat.task import Job

VECTORS = ("delta", "buffers", "counters")
SENT, RECEIVED = "sent/", "received/"
SCORES: wire.Kind = (4,), torch.float64
EXAMINED = Form(
    {f"{SENT}{KEY}/{model}": SCORES for model in MODELS}, frozenset(f"{SENT}{KEY}/{model}" for model in MODELS)
)
"""What a client that was asked to look sends: scores of the models that it has."""


@dataclass(frozen=True)
class Errand:
    """What a client is asked for, beside tensors.

    run: whose state it is to go on from, and kept: of which round, 0 for none. share: ω_i. classes: the model's.
    """

    run: str
    round: int
    client: int
    duty: str
    lr: float
    share: float
    classes: int
    kept: int

    def job(self, content: RecordDict, states: dict[str, State]) -> Job:
        """The complete job, given what came with it and what the client has kept."""
        own = wire.tensors(content, "common")
        if "own" in content:
            own |= wire.tensors(content, "own")
        received = nest({key.removeprefix(RECEIVED): own.pop(key) for key in list(own) if key.startswith(RECEIVED)})
        return Job(self.round, self.client, self.lr, 0.0, **own, received=received, states=states, duty=self.duty)


def common(broadcast: Broadcast) -> ArrayRecord:
    """What goes to all clients of a visit."""
    received = {
        f"{RECEIVED}{part}/{name}": t for part, state in broadcast.received.items() for name, t in state.items()
    }
    vectors = {"theta": broadcast.theta, "buffers": broadcast.buffers, "counters": broadcast.counters}
    return wire.arrays(vectors | received)


def request(errand: Errand, shared: ArrayRecord, order: Order) -> RecordDict:
    """The server's letter."""
    content = RecordDict({"errand": ConfigRecord(asdict(errand)), "common": shared})
    if order.theta is not None:
        content["own"] = wire.arrays({"theta": order.theta})
    return content


def errand_of(content: RecordDict) -> Errand:
    """What the server's letter asks for."""
    return Errand(**wire.values(content, "errand"))


def carried(update: Update) -> dict[str, Tensor]:
    """The tensors of an update by name."""
    vectors = {name: getattr(update, name) for name in VECTORS if getattr(update, name).numel()}
    return vectors | {f"{SENT}{key}": tensor for key, tensor in flatten(update.sent).items()}


def reply(update: Update, errand: Errand, kept: int) -> RecordDict:
    """The client's letter. kept: of which round its state is now."""
    told: dict[str, Any] = {"round": errand.round, "client": errand.client, "kept": kept, "steps": update.steps}
    told |= {"loss": float(update.loss), "seconds": float(update.seconds)}
    if update.failure is not None:
        return RecordDict({"told": ConfigRecord(told | {"failure": update.failure})})
    figures = ConfigRecord({name: float(value) for name, value in update.figures.items()})
    return RecordDict({"told": ConfigRecord(told), "figures": figures, "update": wire.arrays(carried(update))})


def read_reply(content: RecordDict, errand: Errand, form: Form, figures: frozenset[str], like: Tensor) -> Update:
    """The update in a client's letter, or an error that says why it cannot be used.

    form, figures: what it may hold. like: the buffers that were sent.
    """
    told = wire.values(content, "told")
    if (wire.whole(told, "round"), wire.whole(told, "client")) != (errand.round, errand.client):
        raise RefusedError(f"answered for round {told['round']} and client {told['client']}")
    if "failure" in told:
        raise RefusedError(f"failed: {wire.text(told, 'failure')}")
    tensors: dict[str, Any] = {**wire.tensors(content, "update", form)}
    for name, tensor in tensors.items():
        wire.check_finite(name, tensor, like if name == "buffers" else None)
    kept = wire.whole(told, "kept")
    if kept not in (0, errand.kept, errand.round):
        raise RefusedError(f"kept a state of round {kept}")
    sent = {key.removeprefix(SENT): tensors.pop(key) for key in list(tensors) if key.startswith(SENT)}
    return Update(
        errand.client,
        0,
        wire.real(told, "seconds"),
        steps=wire.whole(told, "steps"),
        loss=wire.real(told, "loss", nan=True),
        sent={KEY: {}} | nest(sent) if errand.duty == "examine" else nest(sent),
        states=stub(kept),
        figures=_figures(content, figures),
        **tensors,
    )


def _figures(content: RecordDict, known: frozenset[str]) -> dict[str, float]:
    record = wire.values(content, "figures")
    if set(record) - known:
        raise RefusedError("sent figures that nobody asked for")
    return {name: wire.real(record, name, nan=True) for name in record}


def stub(kept: int) -> dict[str, State]:
    """What the server keeps for a client: the round of the state that the client has, and nothing of it."""
    return {"flower": {"kept": torch.tensor([kept])}} if kept else {}


def kept_of(states: Mapping[str, State]) -> int:
    """The round in a stub; 0 for a client that keeps nothing."""
    return int(states["flower"]["kept"]) if states else 0


def failed(client: int, why: str) -> Update:
    """An update that cannot be used."""
    return Update(client, 0, 0.0, loss=math.nan, failure=why)
