"""Who is there: which node of the grid is which client, as the nodes tell in answer to a hello."""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedflat.errors import CheckpointError, RunError
from fedflat.experiment import Experiment
from fedflat.flower import validation
from fedflat.flower.admission import Admission
from fedflat.flower.data_summary import DataSummary
from fedflat.flower.identity import fresh_nonce, verified_key
from fedflat.flower.transport import Transport, pauses
from fedflat.flower.validation import RefusedError, fingerprint
from fedflat.runs.files import write_atomically

log = logging.getLogger(__name__)
FILE = "flower.json"
VALID = 600.0  # seconds for which a hello stays valid: a node may be there long before it can answer
AGAIN = 60.0  # seconds after which a node that was refused is asked again
SECRET = 128  # bits of the seed that no client knows: as many as a stream's key has


class Members:
    """The clients that have ever joined a run, and the nodes where they are now.

    A client's number belongs for ever to the key with which it first joined, or to that of the server's list. Of two
    nodes with that key, the first one is the client for as long as it is online.

    Attributes:
        run: Its name, under which clients keep their states.
        seed: One that no client knows.
        data: What counts of each client's data, once all have joined; sizes are limited by `Admission.max_weight`.
        nodes: Where those clients are that can be reached.
        barred: Why a client whose node is there cannot take part.
    """

    def __init__(self, grid: Grid, experiment: Experiment, admission: Admission, folder: Path | None = None) -> None:
        self.grid, self.experiment, self.admission = grid, experiment, admission
        self.run, self.seed, self.data = uuid.uuid4().hex, secrets.randbits(SECRET), dict[int, DataSummary]()
        self.nodes: dict[int, int] = {}
        self.barred: dict[int, str] = {}
        self._told: dict[int, DataSummary] = {}  # as the clients themselves say
        self._keys: dict[int, str] = {}  # public keys of those that have joined
        self._claims: dict[int, int] = {}  # node → client, in the order in which they came
        self._greeted: dict[int, tuple[str, bytes]] = {}  # node → message to it that is still to be answered, its nonce
        self._refused: dict[int, float] = {}  # node → when
        self._transport = Transport(grid)
        if folder is not None and (folder / FILE).exists():
            self._load(folder / FILE)

    def gather(self, wait: float) -> None:
        """Wait until all clients have joined. After `wait` seconds, go on if it is known who the others are."""
        end, clients = time.monotonic() + wait, self.experiment.clients
        for _ in pauses():
            self.refresh()
            if len(self.nodes) == clients or time.monotonic() > end:
                break
        known = {i: one for i in range(clients) if (one := self._told.get(i) or self.admission.expected(i))}
        absent = [str(client) for client in range(clients) if client not in known]
        if absent or not self.nodes:
            who = f"clients {', '.join(absent[:10])}" if absent else "any client"
            raise RunError(f"waited {wait:g} s in vain for {who} of {clients} to join: start their SuperNodes")
        if len(self.nodes) < clients:
            log.warning("%d of %d clients are there; going on without the others", len(self.nodes), clients)
        self._settle(known)

    def _settle(self, known: dict[int, DataSummary]) -> None:
        """Decide what counts: the form that most samples have, and no size that outweighs the others."""
        form, holders = Counter((one.x, one.y) for one in known.values()).most_common(1)[0]
        if 2 * holders <= len(known) and holders < len(known):
            raise RunError("no form of samples is that of most clients: say in the list of clients which one is right")
        self.admission = replace(self.admission, x=form[0], y=form[1])
        for client in [i for i, one in known.items() if (one.x, one.y) != form]:
            self.barred[client] = "has samples of another form than most others"
            log.warning("client %d %s: it is left out of every round", client, self.barred[client])
            known[client] = replace(known[client], x=form[0], y=form[1])
        for client, size in self.admission.counted(known).items():
            if size < known[client].samples:
                log.warning("client %d says it has %d samples; %d count", client, known[client].samples, size)
            known[client] = replace(known[client], samples=size)
        self.data = known

    def refresh(self) -> None:
        """Forget the nodes that are gone, greet new ones, and admit those that have answered since the last time."""
        online = set(self.grid.get_node_ids())
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        for node in [node for node in self._greeted if node not in online]:
            del self._greeted[node]
        waiting = {node for node, when in self._refused.items() if time.monotonic() < when + AGAIN}
        for node in sorted(online - self._claims.keys() - self._greeted.keys() - waiting):
            self._greet(node)
        for node, (identity, nonce) in list(self._greeted.items()):
            answer = self._transport.pull(identity)
            if answer is not None:
                del self._greeted[node]
                self._admit(node, nonce, answer)
        self.nodes = {client: node for node, client in reversed(self._claims.items())}

    def _greet(self, node: int) -> None:
        nonce = fresh_nonce()
        content = RecordDict({"hello": ConfigRecord({"nonce": nonce})})
        identity = self._transport.push(Message(content, node, "query.hello", ttl=VALID))
        if identity:
            self._greeted[node] = identity, nonce

    def _admit(self, node: int, nonce: bytes, answer: RecordDict | RefusedError) -> None:
        """Write down what a node claims, or why it is refused."""
        try:
            if isinstance(answer, RefusedError):
                raise answer
            client = self._claim(nonce, validation.values(answer, "hello"))
        except RefusedError as error:
            log.warning("node %d cannot join: it %s", node, error)
            self._refused[node] = time.monotonic()
            return
        if client in self._claims.values():
            log.warning("node %d cannot join: client %d is there already, on another node", node, client)
        self._claims[node] = client

    def _claim(self, nonce: bytes, hello: ConfigRecord) -> int:
        client, theirs = validation.whole(hello, "client"), validation.text(hello, "experiment")
        if client >= self.experiment.clients:
            raise RefusedError(f"says it is client {client}, and there are clients 0 to {self.experiment.clients - 1}")
        if theirs != fingerprint(self.experiment):
            raise RefusedError(f"runs another experiment, as client {client}")
        key, summary = verified_key(nonce, hello), DataSummary.read(hello)
        if self._keys.get(client, key) != key:
            raise RefusedError(f"says it is client {client}, which joined with another key")
        if any(other == key for i, other in self._keys.items() if i != client):
            raise RefusedError(f"says it is client {client}, and joined as another client with the same key")
        self.admission.check(client, key, summary)
        if self._told.get(client, summary) != summary:
            raise RefusedError(f"has other data than client {client} had when it joined")
        self._told[client], self._keys[client] = summary, key
        return client

    def save(self, folder: Path) -> None:
        """Write down who has joined, so that a server that is started again need not wait for all."""
        clients = {
            str(client): summary.values() | {"key": self._keys[client]}
            for client, summary in sorted(self._told.items())
        }
        content = json.dumps({"run": self.run, "seed": self.seed, "clients": clients}, indent=1) + "\n"
        write_atomically(folder / FILE, content.encode())

    def _load(self, path: Path) -> None:
        try:
            plain = json.loads(path.read_text())
            self.run, self.seed = str(plain["run"]), int(plain["seed"])
            self._keys = {int(client): str(values["key"]) for client, values in plain["clients"].items()}
            self._told = {int(client): DataSummary.read(values) for client, values in plain["clients"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RefusedError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
