"""The scheduler's workers as actors on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from fedflat.core.scheduler import Call, RepeatCallError, WorkerDiedError
from fedflat.engine.backends.ray.remote import Remote

PATIENCE = 120.0  # seconds to wait for the first worker


def wait_for(refs: Sequence[Any], seconds: float | None) -> Sequence[Any]:
    """See `Scheduler`."""
    heard: Sequence[Any] = ray.wait(list(refs), timeout=seconds, fetch_local=False)[0]
    return heard


@dataclass(eq=False)
class Request:
    """A call of an actor's method.

    Attributes:
        send: Calls an actor; returns the references of its reply and of other results.
        needs: Its arguments that may be lost.
        refs, actor: What `send` returned, and the actor that was called.
    """

    send: Callable[[Any], list[Any]]
    needs: Sequence[Remote[Any]] = ()
    refs: Sequence[Any] = ()
    actor: Any = None

    def restore(self) -> None:
        """Make its arguments again that were lost."""
        for value in self.needs:
            value.fetch()


class RayWorker:
    """An actor. `hello` is the reference of its first reply, which means that it has started: None, or an error."""

    def __init__(self, actor: Any, hello: Any) -> None:
        self.actor, self.starting, self._hello = actor, True, hello
        self.holds: deque[Call] = deque()

    @property
    def waitable(self) -> Any:
        """See `Worker`."""
        return self._hello if self.starting else self.holds[0].request.refs[0]

    def send(self, call: Call) -> None:
        """See `Worker`."""
        request: Request = call.request
        request.actor, request.refs = self.actor, request.send(self.actor)

    def receive(self) -> Any:
        """See `Worker`."""
        try:
            reply = ray.get(self.waitable)
        except RayActorError as error:
            raise WorkerDiedError(type(error).__name__ if not self.starting else str(error)) from None
        except ObjectLostError:
            raise RepeatCallError(self.holds[0].request.restore) from None
        except RayError as error:
            raise WorkerDiedError(str(error)) from None
        self.starting = False
        if isinstance(reply, Exception):
            raise reply
        return reply

    def used(self) -> float | None:
        """See `Worker`. Ray itself notices what has died."""
        return None

    def close(self) -> None:
        """See `Worker`."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)
