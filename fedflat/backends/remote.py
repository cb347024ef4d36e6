"""Values in the memory of a Ray cluster, each with a way to have it again should its node die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError

from fedflat.backends.cluster import Session
from fedflat.backends.parcels import pack, unpack
from fedflat.store import Away, States
from fedflat.sums import Terms

T = TypeVar("T")
LOST = (ObjectLostError, RayActorError)
"""What Ray raises for a value that went with its node, or that a worker did not live to make."""


class Remote(Generic[T]):
    """Something that a worker has made or is about to make, packed. remake: gives it again should it be lost."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], T]) -> None:
        self.session, self.ref, self._remake = session, ref, remake

    def fetch(self) -> T:
        """A copy on this machine. One that had to be made again is put back into the cluster."""
        if not self.session.open:
            return self._remake()
        try:
            value: T = unpack(ray.get(self.ref), own=True)
        except LOST:
            value = self._remake()
            self.ref = ray.put(pack(value))
        return value


class RemoteShares(Remote[Terms]):
    """What some clients add to the sums of a round; `actor`, which has it, adds that of others to it."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], Terms], actor: Any) -> None:
        super().__init__(session, ref, remake)
        self.actor = actor

    def add_(self, other: RemoteShares, /) -> RemoteShares:
        """See `Shares.add_`."""
        ref = self.actor.add.remote(self.ref, other.ref)
        return RemoteShares(self.session, ref, lambda: self.fetch().add_(other.fetch()), self.actor)

    def here(self) -> Terms:
        """See `Shares.here`."""
        return self.fetch()


class Kept(Remote[States], Away):
    """A client's states on the node where it trained last. Lost, they are trained again or read from the disk."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], States], size: int) -> None:
        super().__init__(session, ref, remake)
        self.size = size

    def secure(self, read: Callable[[], States]) -> None:
        """See `Away.secure`."""
        self._remake = read
