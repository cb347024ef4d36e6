"""Numbered pieces of work, divided among forked processes; the results are in shared memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedflat.core.devices import CPU, accelerated
from fedflat.core.forked import ForkedWorker, can_fork, gradients_survive, wait_for
from fedflat.core.processes import available_cores
from fedflat.core.scheduler import Call, Scheduler
from fedflat.core.shared_memory import shared_zeros
from fedflat.errors import InputError


def worker_count(workers: int, pieces: int) -> int:
    """The number of processes for a number of pieces; 1 where PyTorch cannot fork any more, see `gradients_survive`."""
    count = max(1, min(workers or available_cores(), pieces))
    return count if count == 1 or not accelerated() or gradients_survive() else 1


def zeros_for_all(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the type of `like`, where it is; on the CPU, in memory that processes forked from now on share."""
    return shared_zeros(shape, like.dtype) if like.device == CPU else like.new_zeros(shape)


class Parallel:
    """Runs `work(0) … work(pieces − 1)` repeatedly; the same process always does the same piece.

    Args:
        work: Writes its result to a tensor that was made with `zeros_for_all` before this object.
        workers: Number of processes; 1 computes in this process, 0 uses every core.
    """

    def __init__(self, work: Callable[[int], None], pieces: int, workers: int) -> None:
        self._work, self._pieces, self.size = work, pieces, worker_count(workers, pieces)
        self._scheduler: Scheduler | None = None
        if self.size > 1:
            if not can_fork():
                raise InputError(
                    "several workers need processes that fork, which this system does not support: use workers=1"
                )
            self._scheduler = Scheduler(self.size, lambda place: ForkedWorker(work), wait_for)

    def run(self, done: Callable[[int], None] = lambda piece: None) -> None:
        """Do every piece once, and call `done` with the number of each finished piece."""
        if self._scheduler is None:
            for piece in range(self._pieces):
                self._work(piece)
                done(piece)
            return
        pieces = range(self._pieces)
        calls = (Call(lambda: "a part of an analysis", piece, worker=piece % self.size) for piece in pieces)
        for call in self._scheduler.run(calls):
            done(call.request)

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *error: object) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
