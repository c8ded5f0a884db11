"""Flower without a network: messages go straight to a ClientApp in this process."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

Spoil = Callable[[Message, int], Message | None]


class LocalGrid(Grid):
    """One node for every node-config, with a state of its own; `spoil(reply, node)` may change or lose an answer."""

    def __init__(
        self,
        app: ClientApp,
        nodes: dict[int, dict[str, Any]],
        spoil: Spoil | None = None,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        self.app, self.nodes, self.spoil, self.run_config = app, nodes, spoil, run_config or {}
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.states: defaultdict[int, RecordDict] = defaultdict(RecordDict)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = id = str(uuid4())
            ids.append(id)
            node = message.metadata.dst_node_id
            context = Context(1, node, self.nodes[node], self.states[node], self.run_config)
            try:
                reply: Message | None = self.app(message, context)
            except Exception as error:
                reply = Message(Error(1, str(error)), reply_to=message)
            if reply is not None and self.spoil is not None:
                reply = self.spoil(reply, node)
            if reply is not None:
                reply.metadata.__dict__["_reply_to_message_id"] = id
                self.replies[id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(id) for id in message_ids if id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError
