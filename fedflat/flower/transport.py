"""Messages through Flower's grid, one by one, so that a bad one spoils no other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedflat.flower.validation import RefusedError, printable

log = logging.getLogger(__name__)
SHORTEST, LONGEST = 0.01, 0.5  # seconds between two looks


class Transport:
    """Sends, and fetches answers; a failure of the other side is an answer that says so."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def push(self, message: Message) -> str | None:
        """Send a message; returns its name, None where it cannot be sent."""
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, identity: str) -> RecordDict | RefusedError | None:
        """The answer to a message, or None while there is none."""
        try:
            answers = list(self.grid.pull_messages([identity]))
        except (ValueError, TypeError, KeyError) as error:  # the content cannot even be unpacked
            return RefusedError(f"sent what cannot be read: {printable(error)}")
        if not answers:
            return None
        if answers[0].has_error():
            return RefusedError(f"failed: {printable(answers[0].error.reason, quoted=False)}")
        return answers[0].content

    def exchange(self, messages: Mapping[int, Message | None], timeout: float) -> dict[int, RecordDict | RefusedError]:
        """Send to each client, and wait for all answers, or until the time is over. None: it is not there."""
        sent = {client: self.push(message) if message else None for client, message in messages.items()}
        end = time.monotonic() + timeout
        return {client: self.answer(identity, end, timeout) for client, identity in sent.items()}

    def answer(self, identity: str | None, end: float, timeout: float) -> RecordDict | RefusedError:
        """Wait for the answer to a message until a moment of the monotonic clock."""
        if identity is None:
            return RefusedError("is not there, or is barred")
        for _ in pauses():
            late, answer = time.monotonic() > end, self.pull(identity)
            if answer is not None:
                return answer
            if late:
                break
        return RefusedError(f"has not answered within {timeout:g} s")


def pauses() -> Iterator[None]:
    """Wait before every look but the first, ever longer, but for no more than about a tenth of the time so far."""
    pause = SHORTEST
    while True:
        yield
        time.sleep(pause)
        pause = min(LONGEST, 1.1 * pause)
