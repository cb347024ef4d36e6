"""A back end that runs everything in this process, for debugging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from fedflat.core import streams
from fedflat.core.scores import Score
from fedflat.core.updates import Updates
from fedflat.engine.evaluation import score_chunk
from fedflat.engine.jobs import run_jobs
from fedflat.engine.placement import placed
from fedflat.engine.setup import Broadcast, Chunk, Jobs, Setup


class Serial:
    """Trains one client after the other in this process; breakpoints in parts work."""

    def __init__(self, setup: Setup) -> None:
        self.setups = [placed(setup, device) for device in setup.devices]
        self.setup = self.setups[0]

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """See `Backend.run`."""
        with streams.preserved():
            for block, setup in zip(jobs.blocks(self.setup.block), cycle(self.setups), strict=False):
                yield run_jobs(setup, broadcast, block)

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """See `Backend.evaluate`."""
        for setup in self.setups:
            setup.load(broadcast)
        return [score_chunk(setup, chunk) for chunk, setup in zip(chunks, cycle(self.setups), strict=False)]

    def close(self) -> None:
        """Nothing to release."""
