"""Who is there: which node of the grid is which client, as the nodes tell in answer to a hello."""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedflat.errors import CheckpointError, RunError
from fedflat.experiment import Experiment
from fedflat.flower import wire
from fedflat.flower.facts import Facts
from fedflat.flower.post import Post, pauses
from fedflat.flower.wire import RefusedError, fingerprint
from fedflat.store import write_atomically

log = logging.getLogger(__name__)
FILE = "flower.json"
VALID = 600.0  # seconds for which a hello stays valid: a node may be there long before it can answer
AGAIN = 60.0  # seconds after which a node that was refused is asked again


class Roll:
    """The clients that have ever joined a run, and the nodes where they are now.

    run: its name, under which clients keep their states. seed: one that no client knows. facts: what is known of each
    client. nodes: where those are that can be reached. The first node to claim a client's number has it for as long as
    it is online.
    """

    def __init__(self, grid: Grid, experiment: Experiment, folder: Path | None = None) -> None:
        self.grid, self.experiment = grid, experiment
        self.run, self.seed, self.facts = uuid.uuid4().hex, secrets.randbits(63), dict[int, Facts]()
        self.nodes: dict[int, int] = {}
        self._claims: dict[int, int] = {}  # node → client, in the order in which they came
        self._greeted: dict[int, str] = {}  # node → message to it that is still to be answered
        self._refused: dict[int, float] = {}  # node → when
        self._post = Post(grid)
        if folder is not None and (folder / FILE).exists():
            self._load(folder / FILE)

    def gather(self, wait: float) -> None:
        """Wait until all clients have joined. After `wait` seconds, go on if it is known who the others are."""
        end, clients = time.monotonic() + wait, self.experiment.clients
        for _ in pauses():
            self.refresh()
            if len(self.nodes) == clients:
                return
            if time.monotonic() > end:
                break
        absent = [str(client) for client in range(clients) if client not in self.facts]
        if absent or not self.nodes:
            who = f"clients {', '.join(absent[:10])}" if absent else "any client"
            raise RunError(f"waited {wait:g} s in vain for {who} of {clients} to join: start their SuperNodes")
        log.warning("%d of %d clients are there; going on without the others", len(self.nodes), clients)

    def refresh(self) -> None:
        """Forget the nodes that are gone, greet new ones, and admit those that have answered since the last time."""
        online = set(self.grid.get_node_ids())
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        for node in [node for node in self._greeted if node not in online]:
            del self._greeted[node]
        waiting = {node for node, when in self._refused.items() if time.monotonic() < when + AGAIN}
        for node in sorted(online - self._claims.keys() - self._greeted.keys() - waiting):
            content = RecordDict({"hello": ConfigRecord({})})
            identity = self._post.push(Message(content, node, "query.hello", ttl=VALID))
            if identity:
                self._greeted[node] = identity
        for node, identity in list(self._greeted.items()):
            answer = self._post.pull(identity)
            if answer is not None:
                del self._greeted[node]
                self._admit(node, answer)
        self.nodes = {client: node for node, client in reversed(self._claims.items())}

    def _admit(self, node: int, answer: RecordDict | RefusedError) -> None:
        """Write down what a node claims, or why it is refused."""
        try:
            if isinstance(answer, RefusedError):
                raise answer
            client = self._claim(wire.values(answer, "hello"))
        except RefusedError as error:
            log.warning("node %d cannot join: it %s", node, error)
            self._refused[node] = time.monotonic()
            return
        if client in self._claims.values():
            log.warning("node %d cannot join: client %d is there already, on another node", node, client)
        self._claims[node] = client

    def _claim(self, hello: ConfigRecord) -> int:
        client, theirs = wire.whole(hello, "client"), wire.text(hello, "experiment")
        if client >= self.experiment.clients:
            raise RefusedError(f"says it is client {client}, and there are clients 0 to {self.experiment.clients - 1}")
        if theirs != fingerprint(self.experiment):
            raise RefusedError(f"runs another experiment, as client {client}")
        facts = Facts.read(hello)
        known = self.facts.get(client, facts)
        if known != facts:
            raise RefusedError(f"has other data than client {client} had when it joined")
        for other in self.facts.values():
            if (other.x, other.y) != (facts.x, facts.y):
                raise RefusedError(f"has samples, as client {client}, of another form than those who came before it")
        self.facts[client] = facts
        return client

    def save(self, folder: Path) -> None:
        """Write down who has joined, so that a server that is started again need not wait for all."""
        clients = {str(client): facts.values() for client, facts in sorted(self.facts.items())}
        content = json.dumps({"run": self.run, "seed": self.seed, "clients": clients}, indent=1) + "\n"
        write_atomically(folder / FILE, content.encode())

    def _load(self, path: Path) -> None:
        try:
            plain = json.loads(path.read_text())
            self.run, self.seed = str(plain["run"]), int(plain["seed"])
            self.facts = {int(client): Facts.read(values) for client, values in plain["clients"].items()}
        except (ValueError, KeyError, TypeError, RefusedError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
