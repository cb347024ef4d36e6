"""The interface of a back end, and clients' states on another machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Protocol

from fedflat.core.scores import Score
from fedflat.core.tensors import State, States
from fedflat.core.updates import Updates
from fedflat.engine.setup import Broadcast, Chunk, Jobs


class Backend(Protocol):
    """Runs clients. Results come in the order of the jobs, on any number of workers."""

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """Do the jobs; `Updates.of([update], terms)` makes what is returned of the update of a single client.

        The `states` of updates are valid only until the next updates are taken. Terms of consecutive clients may be
        added along the tree of `TreeSum`.
        """

    def evaluate(self, broadcast: Broadcast, chunks: Sequence[Chunk]) -> list[Score]:
        """Score the broadcast weights on each chunk."""

    def close(self) -> None:
        """Release what the back end holds."""


class RemoteStates(Mapping[str, State]):
    """A client's states on another machine, where they may be lost. Reading them fetches them.

    Attributes:
        size: Their size in bytes.
    """

    size = 0

    @abstractmethod
    def fetch(self) -> States:
        """A copy on this machine."""

    @abstractmethod
    def secure(self, read: Callable[[], States]) -> None:
        """Note that they are now on this machine's disk as well, where `read` finds them."""

    def __getitem__(self, part: str) -> State:
        return self.fetch()[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetch())

    def __len__(self) -> int:
        return len(self.fetch())

    def __bool__(self) -> bool:
        return True  # empty states are not kept

    def items(self) -> ItemsView[str, State]:
        """All states, fetched once."""
        return self.fetch().items()
