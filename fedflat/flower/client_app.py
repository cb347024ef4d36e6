"""`client_app`: a client of the federation that trains on its own data and keeps its state on its own disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedflat.core import streams
from fedflat.core.devices import resolve
from fedflat.core.processes import keep_pages, single_thread
from fedflat.core.samples import Samples
from fedflat.core.tensors import copied
from fedflat.data import Federation, load_federation
from fedflat.data.samples import as_samples
from fedflat.engine.assembly import assemble
from fedflat.engine.jobs import JOBS
from fedflat.engine.measuring import choose_metrics
from fedflat.engine.placement import explaining_memory, placed
from fedflat.engine.setup import Criterion, Setup
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.flower.data_summary import DataSummary, labelled
from fedflat.flower.identity import private_key, public_text, sign
from fedflat.flower.messages import Instruction, instruction_of, nonce_of, received, reply
from fedflat.flower.secagg_client import STEPS, masked_reply, require_shares
from fedflat.flower.secrecy import owner_only
from fedflat.flower.validation import fingerprint
from fedflat.runs.store import ClientStore

STATE = "fedflat-state"  # where states lie if nobody says where
Data = Federation | Callable[[Context], Any]


def client_app(
    experiment: Experiment,
    *,
    data: Data,
    model: nn.Module | None = None,
    loss: Criterion | None = None,
    state: str | Path = STATE,
    secagg: bool = False,
) -> ClientApp:
    """A Flower `ClientApp` that is client `client` (else `partition-id`) of the node's configuration.

    data: from the node's context to what this client holds: a pair `(x, y)`, a map-style dataset, or a `Federation` of
        one client, which may have a test set of its own and a `preprocess`. A `Federation` of all clients, given as it
        is or by the function, is for simulations: of it this client takes its own part. Given as it is, it travels
        with the app, in Flower's simulation with every message.
    model, loss: as for `fedflat.run`, and the same on all machines.
    state: folder for what the method keeps for this client; `state` of the node's configuration wins. It never
        leaves this machine. It also holds the key that tells this client from others, unless `key` of the node's
        configuration names a file with one.
    secagg: send updates with masks only, so that the server learns nothing but sums; see `server_app`.
    """
    app, client = ClientApp(), Client(experiment, data, model, loss, Path(state), secagg)
    app.query("hello")(client.hello)
    for register in (app.train(), app.evaluate(), app.query("estimate")):
        register(client.serve)
    for step in STEPS if secagg else ():
        app.query(step)(client.agree)
    return app


def named_data(experiment: Experiment, root: str | Path | None = None) -> Callable[..., Federation]:
    """The data set that the experiment names, divided as it says, for trials: for `data=` and `test=`.

    It is loaded when first asked for. root: where data sets lie; see `fedflat.run`.
    """
    return lambda context=None: _load(experiment, root)


@lru_cache(maxsize=1)
def _load(e: Experiment, root: str | Path | None) -> Federation:
    return load_federation(e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout)


@dataclass
class OwnSetup(Setup):
    """A client's setup. known_share: ω_i, which the server knows, as nobody else's data are here."""

    known_share: float = 1.0

    def share(self, client: int) -> float:
        """See `Setup.share`."""
        return self.known_share


@dataclass(frozen=True)
class Client:
    """Answers the server's messages; see `client_app`."""

    experiment: Experiment
    data: Data
    model: nn.Module | None
    loss: Criterion | None
    state: Path
    secagg: bool = False

    def hello(self, message: Message, context: Context) -> Message:
        """Tell which client this is and what its samples look like, as far as the server must know."""
        number = self._number(context)
        summary = DataSummary.of(self._held(context, number), number, self.experiment.dtype)
        key = self._key(context, number)
        told = summary.values() | {"client": number, "experiment": fingerprint(self.experiment)}
        told |= {"key": public_text(key)}
        told |= {"signature": sign(key, nonce_of(message.content), told)}
        return Message(RecordDict({"hello": ConfigRecord(told)}), reply_to=message)

    def serve(self, message: Message, context: Context) -> Message:
        """Do a job, going on from the state that the server names, and keep the new one on disk."""
        asked, number = self._asked(message, context, JOBS), self._number(context)
        if self.secagg and asked.kind == "train":
            require_shares(asked, context)
        elif self.secagg and asked.kind == "estimate":
            raise InputError(f"client {number} sends nothing without masks, and was asked for its statistics")
        with owner_only(self._folder(context)):
            return self._served(message, context, asked, number)

    def agree(self, message: Message, context: Context) -> Message:
        """Take a step of secure aggregation, before or after training."""
        asked = self._asked(message, context, STEPS)
        return Message(STEPS[asked.kind](asked, message.content, context), reply_to=message)

    def _asked(self, message: Message, context: Context, kinds: Container[str]) -> Instruction:
        asked, number = instruction_of(message.content), self._number(context)
        if asked.client != number or asked.kind not in kinds or not re.fullmatch("[0-9a-f]{32}", asked.run):
            raise InputError(f"client {number} was sent what is not for it: {asked}")
        return asked

    def _served(self, message: Message, context: Context, asked: Instruction, number: int) -> Message:
        store = ClientStore(self._folder(context) / asked.run / str(number))
        # Of two states the older one is needed until the server says that it has saved the round that made the newer.
        store.restore({number: asked.kept} if asked.kept else {})
        if asked.kind == "train":
            store.prune()
        keep_pages()
        with single_thread(), streams.preserved():
            setup = self._setup(context, asked)
            broadcast, job = received(message.content, copied(store.get(number)))
            with explaining_memory(setup, f"client {number} in round {asked.round}"):
                update = JOBS[asked.kind].work(setup, broadcast.on(setup.device), job.on(setup.device)).hosted()
        if asked.kind == "train" and update.failure is None:
            store.put(number, update.states)
            store.commit_round(asked.round)
            store.flush()
        kept = store.versions.get(number, 0)
        if self.secagg and asked.kind == "train":
            content = masked_reply(update, asked, kept, message.content, broadcast.buffers, context)
            return Message(content, reply_to=message)
        return Message(reply(update, asked, kept), reply_to=message)

    def _number(self, context: Context) -> int:
        config = context.node_config
        number, clients = config.get("client", config.get("partition-id")), self.experiment.clients
        if type(number) is not int or not 0 <= number < clients:
            raise InputError(
                f"this node must know which client it is: start it with --node-config 'client=N', N from 0 to "
                f"{clients - 1} (it has {number!r})"
            )
        return number

    def _folder(self, context: Context) -> Path:
        return Path(str(context.node_config.get("state", self.state)))

    def _key(self, context: Context, number: int) -> ec.EllipticCurvePrivateKey:
        """The key that tells this client from others: that of the node's configuration, or one made at first need."""
        given = context.node_config.get("key")
        folder = self._folder(context)
        return private_key(Path(str(given)) if given else folder / f"client-{number}.key", make=not given)

    def _held(self, context: Context, number: int) -> Federation:
        """A federation of one client: this one."""
        given = self.data(context) if callable(self.data) else self.data
        if not isinstance(given, Federation):
            return Federation([as_samples(given, f"client {number}")])
        if len(given) not in (1, self.experiment.clients):
            raise InputError(f"data= gives {len(given)} clients, neither one nor the experiment's")
        place = 0 if len(given) == 1 else number
        test = given.client_test(place)
        classes = given.classes if labelled(given.samples(place)) else None
        own = [given.samples(place)]
        tests, task = [test] if test else None, given.task
        return Federation(own, client_tests=tests, classes=classes, preprocess=given.preprocess, task=task)

    def _setup(self, context: Context, asked: Instruction) -> Setup:
        """What a worker of a simulation holds, but with this client's data only."""
        held, e = self._held(context, asked.client), self.experiment
        test = held.client_test(0)
        federation = Federation(
            Alone(asked.client, e.clients, held.samples(0)),
            client_tests=Alone(asked.client, e.clients, test) if test else None,
            classes=asked.classes or None,
            preprocess=held.preprocess,
            task=held.task,
        )
        shape = None if self.model is not None else held.input_shape
        setup = assemble(e, federation, self.model, self.loss, shape)
        if asked.kind == "evaluate":
            choose_metrics(setup, samples=held.samples(0))
        return placed(OwnSetup(**vars(setup), known_share=asked.share), resolve(e.device)[0])


class Alone(Sequence[Samples]):
    """One client's samples at its place in a federation of which nothing else is here."""

    def __init__(self, place: int, count: int, samples: Samples) -> None:
        self._place, self._count, self._samples = place, count, samples

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index != self._place:
            raise InputError(f"client {index} holds its data itself; this is client {self._place}")
        return self._samples
