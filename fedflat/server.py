"""The round loop: the only place where the server acts, whatever the method."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.base import Backend, Broadcast, Order, chunks_of
from fedflat.contribution import BUFFERS, DELTA
from fedflat.errors import RoundLostError, TooFewError
from fedflat.examine import MODELS, scores
from fedflat.fairness import Fairness
from fedflat.method import Server, Update
from fedflat.scoring import Score
from fedflat.statistics import batchnorms
from fedflat.store import ClientStore
from fedflat.sums import Shares, Terms, TreeSum
from fedflat.task import Task

log = logging.getLogger(__name__)
RECOMPUTE_CLIENTS = 100  # over how many clients at most BatchNorm's statistics are estimated
RECOMPUTED = "recompute"  # where the server keeps them until the weights change
SEEN = "seen"  # where it keeps who has ever been heard
Row = dict[str, Any]


@dataclass
class Tally:
    """What the round loop counts while updates stream by."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    loss: float = 0.0
    samples: int = 0
    heard: int = 0
    weight: float = 0.0
    steps: float = 0.0
    largest: int = -1
    floats_up: int = 0


class RoundLoop:
    """Runs rounds on a back end, from `server`'s state onwards.

    choose: from t = 0, 1, … to the participants. store: what clients keep from round to round.
    """

    def __init__(
        self,
        task: Task,
        server: Server,
        backend: Backend,
        store: ClientStore,
        choose: Callable[[int], list[int]],
    ) -> None:
        self.task, self.server, self.backend, self.store, self.choose = task, server, backend, store, choose
        self.server.uniform, self.server.sampled = task.uniform, task.sampled
        self.rows: list[Row] = []
        self.safe: Callable[[], AbstractContextManager[None]] = nullcontext  # where a signal may strike
        self._counters = server.counters
        wanted = task.experiment.evaluate_clients is not None or task.interference_every > 0
        self._examines = wanted and task.federation.has_client_tests
        self._recomputes = task.experiment.batchnorm == "recompute" and bool(batchnorms(task.model.module))
        self.examined: list[Row] = []

    def examine(self) -> list[Row]:
        """Every client's models on its own test data: one row a client that has any."""
        server, rows = self.server, list[Row]()
        seen = server.states.get(SEEN, {}).get("clients", torch.zeros(server.clients, dtype=torch.bool))
        orders = (self._order(client, "examine") for client in range(len(self.task.federation)))
        for update in self.backend.visit(self._broadcast_weights(received=True), orders):
            found = scores(update)
            if not found:
                continue
            new = update.client >= server.clients
            row: Row = {"round": server.round, "client": update.client, "new": new, "samples": update.samples}
            row["seen"] = not new and bool(seen[update.client])
            rows.append(row | {name: found[name].accuracy if name in found else None for name in MODELS})
        return rows

    def _clients_due(self) -> bool:
        server, every = self.server, self.server.experiment.evaluate_clients
        often = [n for n in (every, self.task.interference_every) if n]
        return self._examines and (server.round == server.rounds or any(server.round % n == 0 for n in often))

    def run_round(self) -> Row:
        """One round: schedule, pick, broadcast, train, combine, step, conclude, evaluate. Returns its metrics.

        The server and the store change only after every update has arrived, so that a round which is interrupted
        before that leaves both as they were.
        """
        start = time.perf_counter()
        server = self.server
        clients = self._longest_first(self.choose(server.round))
        server.round += 1
        server.asked = len(clients)
        tally = Tally()
        try:
            server.lr = learning_rate(self.task, server)
            server.origin = server.theta.clone()
            broadcast = self._broadcast(server.theta)
            with self.safe():
                combined = self._heard(self._updates(broadcast, clients), tally)
        except BaseException as error:
            server.round -= 1
            self.store.forget_pending()
            if isinstance(error, _NothingError):
                raise self._lost(clients, tally) from None
            raise
        if combined is not None:
            self._apply(*combined, tally)
        self.rows = sorted(tally.rows, key=lambda row: int(row["client"]))
        return self._metrics(tally, broadcast, len(clients), start)

    def _heard(self, updates: Iterator[Update], tally: Tally) -> tuple[Tensor, Terms] | None:
        """What the round comes to, or None where it changes nothing."""
        try:
            return self._combined(updates, tally)
        except TooFewError as error:
            if not self.task.deployed:
                raise
            log.warning("round %d is void: %s", self.server.round, error)
            self.store.forget_pending()
            return self._silence()

    def _silence(self) -> tuple[Tensor, Terms] | None:
        """What a void round comes to: to a zero update, and noise, where it must not be seen that it was void."""
        owner, server = self.task.method.owner("combine"), self.server
        nothing = Update(-1, 0, 0.0, weight=1.0, delta=torch.zeros_like(server.theta))
        return (owner.combine(server, [nothing]), Terms()) if owner.discreet else None

    def _combined(self, updates: Iterator[Update], tally: Tally) -> tuple[Tensor, Terms]:
        """One update of many, and the sums of all else. A part that combines may keep updates, or stop before the last.

        Where none does, the workers have weighted the updates, and perhaps added them: the mean is their sum's.
        """
        sums: TreeSum[Shares] = TreeSum()
        usable, delta = _nonempty(self._tallied(updates, tally, sums)), None
        for part in self.task.method.filling("combine"):
            delta = part.combine(self.server, usable)
        for _ in usable:
            pass
        totals = sums.result().here()
        return totals.pop(DELTA).div_(tally.weight) if delta is None else delta, totals

    def _longest_first(self, clients: list[int]) -> list[int]:
        """The order of training and of every sum: no worker is left with a large client at the end of a round."""
        return sorted(clients, key=lambda client: (-self.task.federation.size(client), client))

    def _broadcast(self, theta: Tensor) -> Broadcast:
        server = self.server
        received = {part.name: part.broadcast(server) for part in self.task.method.filling("broadcast")}
        return Broadcast(server.round, server.lr, theta, server.buffers, server.counters, received)

    def _updates(self, broadcast: Broadcast, clients: list[int]) -> Iterator[Update]:
        sizes = [1 if self.task.uniform else self.task.federation.size(i) for i in clients]
        total = sum(sizes)
        orders = (self._order(i, "train", n / total) for i, n in zip(clients, sizes, strict=True))
        return self.backend.visit(broadcast, orders)

    def _order(self, client: int, duty: str, weight: float = 0.0) -> Order:
        owners = self.task.method.filling("generate")
        theta = owners[0].generate(self.server, client) if owners else None
        return Order(client, weight, self.store.get(client), duty, theta)

    def _tallied(self, updates: Iterator[Update], tally: Tally, sums: TreeSum[Shares]) -> Iterator[Update]:
        """Let the usable updates through, summing on the way all that has one way of being summed."""
        for update in updates:
            sums.add(update.shares)
            if update.failure is not None:
                tally.left_out.append((update.client, update.failure))
                log.warning("round %d: client %d is left out: %s", self.server.round, update.client, update.failure)
                continue
            self._count(update, tally)
            self.store.put(update.client, update.states)
            yield update

    def _count(self, update: Update, tally: Tally) -> None:
        tally.rows.append(
            {
                "round": self.server.round,
                "client": update.client,
                "samples": update.samples,
                "steps": update.steps,
                "loss": update.loss,
                "update_norm": update.norm,
                "seconds": round(update.seconds, 6),
                **update.figures,
            }
        )
        if update.samples > tally.largest:
            tally.largest = update.samples
            self._counters = update.counters.clone()
        if not math.isnan(update.loss):
            tally.loss += update.loss * update.samples
            tally.samples += update.samples
        tally.heard += update.samples
        tally.weight += update.weight
        tally.steps += update.steps
        tally.floats_up = update.floats

    def _apply(self, delta: Tensor, totals: Terms, tally: Tally) -> None:
        server, method = self.server, self.task.method
        server.states.pop(RECOMPUTED, None)  # they were the last weights'
        buffers = totals.pop(BUFFERS, None)
        server.participants = len(tally.rows)
        server.steps = tally.steps / max(1, len(tally.rows))
        server.totals = {}
        for name, total in totals.items():
            owner, tensor = name.split("/", 1)
            server.totals.setdefault(owner, {})[tensor] = total
        for part in method.filling("adjust"):
            delta = part.adjust(server, delta)
        self.task.private.hide(delta)  # what nobody sends stays as it is, whatever noise the parts have added
        server.delta = delta
        method.owner("step").step(server, delta)
        if buffers is not None:
            server.buffers = (buffers / tally.heard).to(server.buffers.dtype)
        server.counters = self._counters
        for part in method.filling("conclude"):
            part.conclude(server)
        self.store.commit_round(server.round)
        if self._examines:
            seen = server.states.setdefault(SEEN, {"clients": torch.zeros(server.clients, dtype=torch.bool)})["clients"]
            seen[[int(row["client"]) for row in tally.rows]] = True

    def _metrics(self, tally: Tally, broadcast: Broadcast, asked: int, start: float) -> Row:
        server = self.server
        score = self.evaluate() if self._due() else Score()
        self.examined = self.examine() if self._clients_due() else []
        return {
            "round": server.round,
            "accuracy": score.accuracy,
            "loss": score.mean_loss,
            "train_loss": tally.loss / tally.samples if tally.samples else None,
            "lr": server.lr,
            "clients": len(tally.rows),
            "left_out": len(tally.left_out),
            "steps": int(tally.steps),
            "floats_down": self.task.floats(broadcast.received.values()),
            "floats_up": tally.floats_up,
            **summary(self.examined),
            **self._remarks(tally.rows),
            "seconds": round(time.perf_counter() - start, 6),
        }

    def _remarks(self, rows: list[Row]) -> Row:
        remarks: Row = {}
        for part in self.task.method.filling("remark"):
            remarks |= part.remark(self.server, rows)
        watched = sum(row.get("watch_seconds", 0.0) for row in rows)
        return remarks | ({"watch_seconds": round(watched, 6)} if watched else {})

    def _due(self) -> bool:
        server, every = self.server, self.server.experiment.evaluate_every
        return server.round == server.rounds or (every > 0 and server.round % every == 0)

    def evaluate(self) -> Score:
        """Score the evaluated weights on the common test set (nothing, where there is no such set or model)."""
        test, broadcast = self.task.federation.test, self._broadcast_weights()
        if test is None or self.task.private.splits:
            return Score()
        scores = self.backend.evaluate(broadcast, chunks_of(len(test), "test"))
        return sum(scores, Score())

    def _broadcast_weights(self, received: bool = False) -> Broadcast:
        """The evaluated weights; received: along with what parts would send, which adaptation may want."""
        server = self.server
        extra = self._broadcast(server.theta).received if received else {}
        weights = evaluated_weights(self.task, server)
        if self._recomputes and RECOMPUTED not in server.states:
            self._recompute(Broadcast(server.round, server.lr, weights, server.buffers, server.counters))
        return Broadcast(server.round, server.lr, weights, *evaluated_buffers(server), extra)

    def _recompute(self, broadcast: Broadcast) -> None:
        """Estimate BatchNorm's statistics for the evaluated weights, over the clients or some spread evenly."""
        clients = np.unique(np.linspace(0, self.task.clients - 1, RECOMPUTE_CLIENTS).astype(int)).tolist()
        sums, counters, samples = TreeSum[Shares](), broadcast.counters, 0
        for update in self.backend.visit(broadcast, (Order(i, 0.0, {}, "statistics") for i in clients)):
            sums.add(update.shares)
            counters = update.counters.clone()
            samples += update.samples
        buffers = (sums.result().here()[BUFFERS] / samples).to(broadcast.buffers.dtype)
        self.server.states[RECOMPUTED] = {"buffers": buffers, "counters": counters}

    def _lost(self, clients: list[int], tally: Tally) -> RoundLostError:
        reasons = "; ".join(f"client {client}: {why}" for client, why in tally.left_out[:5])
        return RoundLostError(
            f"round {self.server.round + 1} is lost: none of its {len(clients)} clients returned a finite update "
            f"({reasons}). A smaller lr, or clip, may help"
        )


class _NothingError(TooFewError):
    pass


def _nonempty(updates: Iterator[Update]) -> Iterator[Update]:
    first = next(updates, None)
    if first is None:
        raise _NothingError("none of its clients could be heard")
    yield first
    yield from updates


def learning_rate(task: Task, server: Server) -> float:
    """The clients' learning rate in `server.round`."""
    lr = server.experiment.lr * server.experiment.lr_decay ** (server.round - 1)
    for part in task.method.filling("schedule"):
        lr = part.schedule(lr, server)
    return lr


def evaluated_weights(task: Task, server: Server) -> Tensor:
    """The weights that `Experiment.evaluated` names; the server's while there is no average yet."""
    weights = task.evaluator.averaged(server) if task.evaluator else None
    return server.theta if weights is None else weights


def evaluated_buffers(server: Server) -> tuple[Tensor, Tensor]:
    """Buffers and counters that go with the evaluated weights."""
    own = server.states.get(RECOMPUTED)
    return (own["buffers"], own["counters"]) if own else (server.buffers, server.counters)


def summary(rows: list[Row]) -> Row:
    """Means and tails over the clients that may train, for the common and the personal models; empty without rows."""
    found: Row = {}
    for model, prefix in (("common", "clients"), ("personal", "personal")):
        accuracies = [row[model] for row in rows if not row["new"] and row[model] is not None]
        if accuracies:
            found |= {f"{prefix}_{name}": value for name, value in Fairness.of(accuracies).summary().items()}
    return found


def fresh_server(task: Task) -> Server:
    """The server before the first round."""
    return Server(task.model, task.experiment, task.clients)
