"""Clients on other machines, reached through Flower's grid: the back end of `server_app`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedflat.core.scores import Score
from fedflat.core.updates import Updates
from fedflat.core.views import Update
from fedflat.engine.backends.serial import Serial
from fedflat.engine.evaluation import KEY, figures, scores
from fedflat.engine.jobs import JOBS
from fedflat.engine.setup import Broadcast, Chunk, Job, Jobs, Setup
from fedflat.errors import InputError, RunError
from fedflat.flower.dry_run import dry_run
from fedflat.flower.members import Members
from fedflat.flower.messages import Expected, Instruction, common, evaluated_form, failed, kept_of, read_reply, request
from fedflat.flower.outliers import Outliers
from fedflat.flower.secagg_server import SecureRound
from fedflat.flower.transport import Transport, pauses
from fedflat.flower.validation import RefusedError, form_of

log = logging.getLogger(__name__)
TYPES = {"train": "train", "evaluate": "evaluate", "estimate": "query.estimate"}
"""Flower's types of message by kind of job."""


class Flower:
    """Has the members of a run train where they are. timeout: seconds in which a client must answer.

    Clients send what they computed; all that is summed is weighted and summed here, with the sizes that `Members`
    lets count, so that nobody can claim a weight. secagg: clients add masks, and only their sum can be read here.
    """

    def __init__(self, setup: Setup, members: Members, timeout: float, secagg: bool = False) -> None:
        _refuse_simulations(setup)
        setup.deployed, self.secagg = True, secagg
        self.setup, self.members, self.timeout = setup, members, timeout
        self._transport, self._here = Transport(members.grid), Serial(setup)
        self._outliers = Outliers()
        self._expected: dict[str, Expected] = {"evaluate": Expected(evaluated_form(setup.sum_shapes))}

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """See `Backend.run`. Where clients do something else than train, those that do not answer are left out."""
        asked = [job for job in jobs if job.kind != "evaluate" or self.members.data[job.client].tests]
        if not asked:
            return
        kind, heard = asked[0].kind, 0
        self._learn(broadcast, asked[0])
        self._await_one(asked)
        shared = common(broadcast)
        if kind == "train" and self.secagg:
            yield self._summed(broadcast, shared, asked)
            return
        sent = [self._send(broadcast, shared, job) for job in asked]
        end = time.monotonic() + self.timeout
        answers = (
            self._update(broadcast, job, instruction, self._transport.answer(identity, end, self.timeout))
            for job, (instruction, identity) in zip(asked, sent, strict=True)
        )
        for update in self._outliers.judged(answers) if kind == "train" else answers:
            heard += update.failure is None
            if kind == "train" or update.failure is None:
                terms = JOBS[kind].terms(self.setup, [update])
                yield Updates.of([update], terms)
            else:
                log.warning("round %d: client %d is left out: %s", broadcast.round, update.client, update.failure)
        if kind == "estimate" and not heard:
            raise RunError("no client could be heard that was asked for statistics of BatchNorm")

    def _learn(self, broadcast: Broadcast, job: Job) -> None:
        """Find out what may come back."""
        if job.kind == "estimate":
            vectors = {"buffers": broadcast.buffers, "counters": broadcast.counters}
            self._expected[job.kind] = Expected(form_of({name: v for name, v in vectors.items() if v.numel()}))
        elif job.kind not in self._expected:
            self._expected[job.kind] = dry_run(self.setup, broadcast, job, self.members.data[job.client])

    def _await_one(self, asked: Sequence[Job]) -> None:
        """Wait until one of the clients is there at least; not for ever."""
        end = time.monotonic() + self.timeout
        for _ in pauses():
            self.members.refresh()
            if any(job.client in self.members.nodes for job in asked) or time.monotonic() > end:
                return

    def _send(self, broadcast: Broadcast, shared: ArrayRecord, job: Job) -> tuple[Instruction, str | None]:
        instruction = self._instruction(broadcast, job)
        message = self._message(instruction, request(instruction, shared, job))
        return instruction, self._transport.push(message) if message else None

    def _instruction(self, broadcast: Broadcast, job: Job) -> Instruction:
        setup, client = self.setup, job.client
        return Instruction(
            self.members.run,
            broadcast.round,
            client,
            job.kind,
            float(broadcast.lr),
            setup.share(client),
            setup.federation.classes if self.members.data[client].classes else 0,
            kept_of(job.states),
        )

    def _message(self, instruction: Instruction, content: RecordDict) -> Message | None:
        """A message to a client; None if it is not there."""
        client, kind = instruction.client, TYPES.get(instruction.kind, f"query.{instruction.kind}")
        if client not in self.members.nodes or client in self.members.barred:
            return None
        valid = 2 * self.timeout  # answers wait for those that come before them in the order
        return Message(content, self.members.nodes[client], kind, ttl=valid, group_id=str(instruction.round))

    def _summed(self, broadcast: Broadcast, shared: ArrayRecord, jobs: Sequence[Job]) -> Updates:
        """A round of secure aggregation: the updates without vectors, and the sums."""
        expected = self._expected["train"]
        told = {job.client: self._instruction(broadcast, job) for job in jobs}

        def exchange(step: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict | RefusedError]:
            messages = dict[int, Message | None]()
            for client, content in contents.items():
                instruction = replace(told[client], kind=step)
                content["instruction"] = ConfigRecord(asdict(instruction))
                messages[client] = self._message(instruction, content)
            return self._transport.exchange(messages, self.timeout)

        def steps(client: int) -> int:
            return self._most_steps(expected.steps, self.members.data[client].samples)

        asked = {job.client: (told[job.client], job.weight, request(told[job.client], shared, job)) for job in jobs}
        updates = SecureRound(self.setup, broadcast, exchange, expected, steps).run(asked)
        updates.numbers["samples"] = [self.members.data[client].samples for client in updates.numbers["client"]]
        return updates

    def _update(
        self, broadcast: Broadcast, job: Job, instruction: Instruction, answer: RecordDict | RefusedError
    ) -> Update:
        """What was answered, with the counts and weights that are known here."""
        expected, data = self._expected[job.kind], self.members.data[job.client]
        try:
            if isinstance(answer, RefusedError):
                raise answer
            steps = self._most_steps(expected.steps, data.samples) if job.kind == "train" else 0
            update = read_reply(answer, instruction, replace(expected, steps=steps), broadcast.buffers)
            self._inspect(update, data.tests)
        except RefusedError as error:
            return failed(job.client, f"it {error}")
        return replace(update, samples=data.tests if job.kind == "evaluate" else data.samples, weight=job.weight)

    def _most_steps(self, passes: int, samples: int) -> int:
        """The most steps that a client may have made: twice those that the experiment asks for."""
        e = self.setup.experiment
        epoch = -(-samples // (e.batch_size or samples))
        return 2 * passes * max(1, e.local_steps or e.local_epochs * epoch)

    def _inspect(self, update: Update, tests: int) -> None:
        """Refuse scores that cannot be, and what a part knows to be out of its range."""
        targets = tests * math.prod(self.members.data[update.client].y[0])
        for name, score in scores(update).items() if KEY in update.sent else ():
            found = figures(self.setup, score)
            shares = [found.get(metric.name) for metric in self.setup.metrics if metric.share]
            if not (0 < score.count <= targets and all(share is None or 0 <= share <= 1 for share in shares)):
                raise RefusedError(f"sent scores of {name!r} that cannot be: {found} of {score.count} targets")
        for part in self.setup.method.filling("inspect"):
            reason = part.inspect(self.setup, update)
            if reason is not None:
                raise RefusedError(f"sent {reason}")

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`; the common test set is here."""
        return self._here.evaluate(broadcast, chunks)

    def close(self) -> None:
        """Nothing to release: the grid is Flower's."""


def _refuse_simulations(setup: Setup) -> None:
    for part in setup.parts:
        if part.simulation_only:
            raise InputError(
                f"{part.name} serves simulations only, and cannot be deployed: choose another "
                "`evaluated` than 'all', or another method"
            )
