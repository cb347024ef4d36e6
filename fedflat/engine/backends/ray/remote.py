"""Values in the memory of a Ray cluster that can be made again if their node dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError

from fedflat.core.sums import Terms
from fedflat.core.tensors import States
from fedflat.engine.backends.base import RemoteStates
from fedflat.engine.backends.ray.cluster import Session
from fedflat.engine.backends.ray.serialization import pack, unpack

T = TypeVar("T")
LOST = (ObjectLostError, RayActorError)
"""What Ray raises for a value that was lost with its node, or whose worker died before making it."""


class Remote(Generic[T]):
    """A packed value that a worker has made or will make; `remake` makes it again if it is lost."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], T]) -> None:
        self.session, self.ref, self._remake = session, ref, remake

    def fetch(self) -> T:
        """A copy on this machine. A lost value is made again and put back into the cluster."""
        if not self.session.open:
            return self._remake()
        try:
            value: T = unpack(ray.get(self.ref), own=True)
        except LOST:
            value = self._remake()
            self.ref = ray.put(pack(value))
        return value


class RemoteTerms(Remote[Terms]):
    """Terms of some clients in the memory of `actor`, which adds the terms of other clients to them."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], Terms], actor: Any) -> None:
        super().__init__(session, ref, remake)
        self.actor = actor

    def add_(self, other: RemoteTerms, /) -> RemoteTerms:
        """See `Summable.add_`."""
        ref = self.actor.add.remote(self.ref, other.ref)
        return RemoteTerms(self.session, ref, lambda: self.fetch().add_(other.fetch()), self.actor)

    def here(self) -> Terms:
        """See `Summable.here`."""
        return self.fetch()


class KeptStates(Remote[States], RemoteStates):
    """A client's states on the node where it last trained. If lost, they are trained again or read from disk."""

    def __init__(self, session: Session, ref: Any, remake: Callable[[], States], size: int) -> None:
        super().__init__(session, ref, remake)
        self.size = size

    def secure(self, read: Callable[[], States]) -> None:
        """See `RemoteStates.secure`."""
        self._remake = read
