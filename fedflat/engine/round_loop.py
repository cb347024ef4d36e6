"""The round loop: the only place where the server acts, whatever the method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.core.batchnorm import batchnorms
from fedflat.core.schedules import round_factor
from fedflat.core.scores import Score
from fedflat.core.sums import Summable, Terms, TreeSum
from fedflat.core.tensors import State, nest
from fedflat.core.updates import Updates
from fedflat.core.views import Server, Update
from fedflat.engine.backends.base import Backend
from fedflat.engine.combining import combine, warn_of_statistics
from fedflat.engine.domains import by_domain
from fedflat.engine.drawing import Drawing
from fedflat.engine.evaluation import (
    RECOMPUTED,
    Row,
    chunks_of,
    client_figures,
    evaluated_broadcast,
    figures,
    scores,
    summary,
)
from fedflat.engine.faults import check_states
from fedflat.engine.setup import Broadcast, Jobs, Setup
from fedflat.engine.soundness import Snapshot, check_sound, suspect
from fedflat.engine.stacking import dealt
from fedflat.engine.tally import Tally, told
from fedflat.engine.terms import BUFFERS, DELTA
from fedflat.engine.trusted import TrustedClient
from fedflat.errors import RoundLostError, TooFewError

log = logging.getLogger(__name__)
RECOMPUTE_CLIENTS = 100  # most clients over which BatchNorm's statistics are estimated


class ClientStates(Protocol):
    """What clients keep between rounds; `runs.store.ClientStore` implements it."""

    def __len__(self) -> int:
        """How many clients keep anything."""

    def get(self, client: int) -> Mapping[str, State]:
        """What the client keeps, read-only; empty if it never took part."""

    def put(self, client: int, states: Mapping[str, State]) -> None:
        """Store a client's new state; it becomes current when the round is committed."""

    def forget_pending(self) -> None:
        """Drop the new states of a failed round."""

    def commit_round(self, round: int) -> None:
        """Make the pending states the current ones."""


class RoundLoop:
    """Runs rounds on a back end, starting from the state of `server`.

    Args:
        store: What clients keep between rounds.
        choose: The participants as a function of t = 0, 1, …, or of t and the clients' last losses.
    """

    def __init__(
        self,
        setup: Setup,
        server: Server,
        backend: Backend,
        store: ClientStates,
        choose: Callable[..., Iterable[int]],
    ) -> None:
        self.setup, self.server, self.backend, self.store = setup, server, backend, store
        self.server.uniform, self.server.sampled = setup.uniform, setup.sampled
        self.rows: Sequence[Row] = ()
        self.safe: Callable[[], AbstractContextManager[None]] = nullcontext  # code that a signal may interrupt
        self.arrived: Callable[[int, int], object] = lambda done, asked: None  # told of the updates of a round
        wanted = setup.experiment.evaluate_clients is not None or setup.interference_every > 0
        self._evaluates_clients = wanted and setup.federation.has_client_tests
        self._draw = Drawing(choose, server, keep=self._evaluates_clients)
        self._recomputes = setup.experiment.batchnorm == "recompute" and bool(batchnorms(setup.model.module))
        self.evaluations: list[Row] = []
        self._own: TrustedClient | None = None
        warn_of_statistics(setup)

    def evaluate_clients(self) -> list[Row]:
        """Evaluate every client's models on its own test data: one row per client with test data."""
        server, rows = self.server, list[Row]()
        seen = self._draw.seen()
        broadcast = replace(self.evaluated(), received=self._broadcast().received)  # adaptation may need it
        everybody = range(len(self.setup.federation))
        jobs = self._jobs(everybody, "evaluate", [0.0] * len(everybody))
        for update in chain.from_iterable(self.backend.run(broadcast, jobs)):
            found = scores(update)
            if not found:
                continue
            new = update.client >= server.clients
            row: Row = {"round": server.round, "client": update.client, "new": new, "samples": update.samples}
            row["seen"] = not new and bool(seen[update.client])
            rows.append(row | client_figures(self.setup, found))
        return rows

    def _clients_due(self) -> bool:
        server, every = self.server, self.server.experiment.evaluate_clients
        often = [n for n in (every, self.setup.interference_every) if n]
        return self._evaluates_clients and (server.round == server.rounds or any(server.round % n == 0 for n in often))

    def run_round(self) -> Row:
        """Run one round and return its metrics: sample, schedule, broadcast, train, combine, step, end, evaluate.

        The server and the store change only after every update has arrived: a round that is interrupted before that
        leaves both as they were.
        """
        start = time.perf_counter()
        server = self.server
        clients, sizes = self._longest_first(self._draw())
        server.round += 1
        server.asked = len(clients)
        tally = Tally()
        try:
            server.lr = learning_rate(self.setup, server)
            server.before, sent = server.theta.clone(), self.setup.method.owner("outgoing").outgoing(server)
            server.origin = server.before if sent is server.theta else sent
            broadcast = self._broadcast()
            server.trusted = self._trusted(broadcast)
            with self.safe():
                updates = told(self._updates(broadcast, clients, sizes), len(clients), self.arrived)
                combined = self._heard(updates, tally)
        except BaseException as error:
            server.round -= 1
            self.store.forget_pending()
            if isinstance(error, _NothingError):
                raise self._lost(clients, tally) from None
            raise
        if combined is not None:
            self._replace(*combined, tally)
        self.rows = tally.rows(server.round)
        return self._metrics(tally, broadcast, start)

    def _trusted(self, broadcast: Broadcast) -> Tensor:
        wanted = max(part.trusted_samples for part in self.setup.parts) if self.setup.parts else 0
        if not wanted:
            return self.server.trusted
        if self._own is None:
            self._own = TrustedClient(self.setup, wanted)
        return self._own.update(broadcast)

    def _heard(self, updates: Iterator[Updates], tally: Tally) -> tuple[Tensor, Terms] | None:
        """The combined update and the sums, or None if the round changes nothing."""
        try:
            return self._combined(updates, tally)
        except TooFewError as error:
            if not self.setup.deployed:
                raise
            log.warning("round %d is void: %s", self.server.round, error)
            self.store.forget_pending()
            tally.void = True
            return self._void()

    def _void(self) -> tuple[Tensor, Terms] | None:
        """The result of a void round: a zero update with noise if the method hides participation, otherwise None."""
        owner, server = self.setup.method.owner("combine"), self.server
        nothing = Update(-1, 0, 0.0, weight=1.0, delta=torch.zeros_like(server.theta))
        return (owner.combine(server, [nothing]), Terms()) if owner.hides_participation else None

    def _combined(self, updates: Iterator[Updates], tally: Tally) -> tuple[Tensor, Terms]:
        """The combined update, and the sums of everything else.

        A part that combines may keep updates, or stop before the last one. Without such a part, the workers have
        weighted the updates and the sum gives the mean.
        """
        sums: TreeSum[Summable] = TreeSum()
        blocks, method = _nonempty(self._tallied(updates, tally, sums)), self.setup.method
        whole = bool(method.filling("combine") or method.filling("regroup"))
        usable = (update for block in blocks for update in block.usable)
        delta, covered = combine(method, self.server, usable) if whole else (None, Terms())
        for _ in blocks:
            pass
        totals = Terms(sums.result().here() | covered)
        return totals.pop(DELTA).div_(tally.total("weight")) if delta is None else delta, totals

    def _longest_first(self, clients: list[int]) -> tuple[list[int], np.ndarray]:
        """Clients in the order of training and of every sum, and their sizes.

        Large clients, or stacks of large clients, come first, so that no worker ends a round with one.
        """
        numbers, sizes = np.array(clients, np.int64), self.setup.federation.sizes_of(clients)
        order = np.lexsort([numbers, -sizes])
        if self.setup.pads:  # otherwise only clients of the same size share a stack
            order = order[dealt(sizes[order], self.setup.stack)]
        return numbers[order].tolist(), sizes[order]

    def _broadcast(self) -> Broadcast:
        server = self.server
        received = {part.name: part.broadcast(server) for part in self.setup.method.filling("broadcast")}
        return Broadcast(server.round, server.lr, server.origin, server.buffers, server.counters, received)

    def _updates(self, broadcast: Broadcast, clients: list[int], sizes: np.ndarray) -> Iterator[Updates]:
        shares = np.ones(len(clients)) if self.setup.uniform else sizes
        return self.backend.run(broadcast, self._jobs(clients, "train", (shares / shares.sum()).tolist()))

    def _jobs(self, clients: Sequence[int], kind: str, weights: Sequence[float]) -> Jobs:
        owners = self.setup.method.filling("generate")

        def own(client: int) -> tuple[Mapping[str, State], Tensor | None]:
            return self.store.get(client), owners[0].generate(self.server, client) if owners else None

        return Jobs(kind, clients, weights, own if owners or len(self.store) else None)

    def _tallied(self, blocks: Iterator[Updates], tally: Tally, sums: TreeSum[Summable]) -> Iterator[Updates]:
        """Yield the updates, and sum their terms, numbers and states on the way."""
        for updates in blocks:
            sums.add(updates.terms, len(updates))
            clients = updates.numbers["client"]
            for place, why in updates.failures.items():
                log.warning("round %d: client %d is left out: %s", self.server.round, clients[place], why)
            tally.add(updates)
            if updates.own or len(self.store):
                for update in updates.usable:
                    self.store.put(update.client, update.states)
            yield updates

    def _replace(self, delta: Tensor, totals: Terms, tally: Tally) -> None:
        """Move the server. In a deployment, a round with a bad result is void, and what was good before stays."""
        if not self.setup.deployed:
            return self._apply(delta, totals, tally)
        good = Snapshot(self.server)
        try:
            self._apply(delta, totals, tally)
        except RoundLostError as error:
            good.restore()
            self.store.forget_pending()
            tally.void = True
            log.warning("round %d is void: %s. %s", self.server.round, error, suspect(tally.rows(self.server.round)))

    def _apply(self, delta: Tensor, totals: Terms, tally: Tally) -> None:
        server, method = self.server, self.setup.method
        server.states.pop(RECOMPUTED, None)  # they belong to the old weights
        buffers = totals.pop(BUFFERS, None)
        server.participants = len(tally.numbers)
        server.samples, heard = int(tally.numbers["samples"].sum()), max(1, server.participants)
        server.steps, server.weighted_steps = tally.total("steps") / heard, tally.total("weighted_steps") / heard
        server.totals = nest(totals)
        self.setup.private.hide(delta)  # parts may have added noise to coordinates that nobody sends
        server.delta = delta
        method.owner("step").step(server, delta)
        if buffers is not None:
            server.buffers = (buffers / server.samples).to(server.buffers.dtype)
        server.counters = server.counters if tally.counters is None else tally.counters
        for part in method.filling("end_round"):
            part.end_round(server)
        check_states(server.states, "server.state(self)")
        check_sound(server)
        self.store.commit_round(server.round)
        self._draw.remember(tally.numbers)

    def _metrics(self, tally: Tally, broadcast: Broadcast, start: float) -> Row:
        server = self.server
        measured = self._measured(self._due())
        self.evaluations = self.evaluate_clients() if self._clients_due() else []
        return {
            "round": server.round,
            **measured,
            "train_loss": tally.loss,
            "lr": server.lr,
            "clients": len(tally.numbers),
            "left_out": len(tally.left_out),
            "steps": int(tally.numbers["steps"].sum()),
            "floats_down": self.setup.floats(broadcast.received.values()),
            "floats_up": tally.floats,
            **summary(self.setup, self.evaluations),
            **self._round_metrics(tally),
            **(self._test_metrics() if self._due() else {}),
            **({"void": 1} if tally.void else {}),
            "seconds": round(time.perf_counter() - start, 6),
        }

    def _round_metrics(self, tally: Tally) -> Row:
        metrics, parts = Row(), self.setup.method.filling("round_metrics")
        rows = list(self.rows) if parts and not tally.void else []
        for part in parts:
            metrics |= part.round_metrics(self.setup, self.server, rows)
        watched = sum(own.get("watch_seconds", 0.0) for own in tally.metrics.values())
        return metrics | ({"watch_seconds": round(watched, 6)} if watched else {})

    def _test_metrics(self) -> Row:
        test, parts, metrics = self.setup.federation.test, self.setup.method.filling("test_metrics"), Row()
        if parts and test is not None and not self.setup.private.splits:
            self.setup.load(self.evaluated())
            self.setup.model.module.eval()
            with torch.no_grad():
                for part in parts:
                    metrics |= part.test_metrics(self.setup, test)
        return metrics

    def _due(self) -> bool:
        server, every = self.server, self.server.experiment.evaluate_every
        return server.round == server.rounds or (every > 0 and server.round % every == 0)

    def _measured(self, due: bool) -> Row:
        """Metrics and loss on the common test set, and on each further test set with its name in front."""
        federation = self.setup.federation
        found = figures(self.setup, self.evaluate() if due else Score())
        for name in federation.tests:
            found |= figures(self.setup, self.evaluate(name) if due else Score(), f"{name}_")
        return found

    def evaluate(self, test: str = "") -> Score:
        """Score the evaluated weights on the common test set or a further one by name; empty without such a model."""
        federation, broadcast = self.setup.federation, self.evaluated()
        samples = federation.test_set(test)
        if samples is None or self.setup.private.splits:
            return Score()
        if self.setup.experiment.batchnorm == "silobn_by_domain":
            return by_domain(self.setup, self.backend, broadcast, self.store.get, test)
        return sum(self.backend.evaluate(broadcast, chunks_of(len(samples), "test", test=test)), Score())

    def evaluated(self) -> Broadcast:
        """The evaluated weights with their statistics, which are first estimated if necessary."""
        broadcast = evaluated_broadcast(self.setup, self.server)
        if self._recomputes and RECOMPUTED not in self.server.states:
            self._recompute(broadcast)
            broadcast = evaluated_broadcast(self.setup, self.server)
        return broadcast

    def _recompute(self, broadcast: Broadcast) -> None:
        """Estimate BatchNorm's statistics for the evaluated weights, over evenly spaced clients."""
        clients = np.unique(np.linspace(0, self.setup.clients - 1, RECOMPUTE_CLIENTS).astype(int)).tolist()
        sums, counters, samples = TreeSum[Summable](), self.server.counters, 0
        for updates in self.backend.run(broadcast, Jobs("estimate", clients, [0.0] * len(clients))):
            sums.add(updates.terms, len(updates))
            samples += int(updates.numbers["samples"].sum())
            for update in updates.usable:
                counters = update.counters.clone()
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


def _nonempty(blocks: Iterator[Updates]) -> Iterator[Updates]:
    heard = 0
    for updates in blocks:
        heard += len(updates) - len(updates.failures)
        yield updates
    if not heard:
        raise _NothingError("none of its clients returned an update")


def learning_rate(setup: Setup, server: Server) -> float:
    """The clients' learning rate in `server.round`."""
    lr = server.experiment.lr * round_factor(server.experiment, server.round - 1)
    for part in setup.method.filling("schedule"):
        lr = part.schedule(lr, server)
    return lr
