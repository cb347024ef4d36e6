"""Everything in this process: the back end for debuggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedflat.backends.base import Broadcast, Chunk, Order, load, score_chunk
from fedflat.duties import perform
from fedflat.method import Update, copied
from fedflat.scoring import Score
from fedflat.task import Task


class Serial:
    """Train one client after the other, here; a breakpoint in a part simply works."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """See `Backend.visit`."""
        for order in orders:
            yield perform(self.task, order.job(broadcast, copied(order.states)))

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        load(self.task, broadcast)
        return [score_chunk(self.task, chunk) for chunk in chunks]

    def close(self) -> None:
        """Nothing to release."""
