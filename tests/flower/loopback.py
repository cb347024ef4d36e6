"""A grid of Flower without a network: messages are taken apart and put together again, and answered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[Message, Message], Message | None]


class Loopback(Grid):
    """Nodes 100, 101, … with client numbers 0, 1, … unless `numbers` says otherwise.

    tamper: from a message and the answer to it to another answer, or None for no answer. messages: all that were sent.
    """

    def __init__(self, app: ClientApp, numbers: Iterable[int], tamper: Tamper | None = None) -> None:
        self.app, self.tamper = app, tamper
        self.numbers = {100 + place: number for place, number in enumerate(numbers)}
        self.messages: list[Message] = []
        self.away: set[int] = set()
        self.configs: dict[int, dict[str, Any]] = {}  # more of the configuration of some nodes
        self._answers: dict[str, Message] = {}
        self.states: dict[int, RecordDict] = {}  # what nodes remember from message to message

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.numbers if node not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = identity = f"{len(self.messages)}"
        arrived = delivered(message)
        arrived.metadata.__dict__["_message_id"] = identity
        node = message.metadata.dst_node_id
        config = {"partition-id": self.numbers[node]} | self.configs.get(node, {})
        context = Context(1, node, config, self.states.setdefault(node, RecordDict()), {})
        try:
            answer: Message | None = self.app(arrived, context)
        except Exception as error:
            answer = Message(Error(1, str(error)), reply_to=arrived)
        if answer is not None and self.tamper is not None and message.metadata.message_type != "query.hello":
            answer = self.tamper(message, answer)
        self.messages += [message, *([answer] if answer is not None else [])]
        if answer is not None:
            self._answers[identity] = delivered(answer) if answer.has_content() else answer
        return identity

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(identity) for identity in message_ids if identity in self._answers]


def delivered(message: Message) -> Message:
    """What arrives at the other end of Flower's wire."""
    parts = get_all_nested_objects(message)
    contents = {identity: part.deflate() for identity, part in parts.items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    return arrived


def instruction(message: Message) -> Any:
    """What the server asks for in a message to a client."""
    return message.content.config_records["instruction"]


def start(app: ServerApp, grid: Grid, **config: Any) -> None:
    """Run a server to its end."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    app(grid, Context(1, 1, {}, RecordDict(), config))
