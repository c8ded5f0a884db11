"""Messages to clients over a Flower grid, by client id.

Node ids change when a SuperNode restarts; client ids do not. A new node is sent a `register` message before anything
else, and a client that comes back under another node id is recognised.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower.schema import ClientDescription, ClientReply, MessageType, SumStage
from fedunfold.engines.flower.server import Messages, Replies
from fedunfold.engines.flower.wire import flower_type, instruction_record, read_registration, read_reply

log = logging.getLogger("fedunfold")

RETRY_AFTER = 10.0
"""Seconds after which a node whose registration was refused is sent `register` again."""
PING_AFTER = 20.0
"""Seconds without a reply after which a node is nudged, that is sent `register` beside the message it was sent: a
SuperNode whose server was killed amid a message stays one reply behind, and gives the last one only when it gets
something new. A node that ever answered the last thing it was sent is not behind, however long it takes, and is never
nudged. Half as long a node that may be behind is waited for before it counts as that."""
POLL_SECONDS = (0.1, 1.0)
"""Least and most time between two polls for replies: a tenth of the wait so far, for every poll costs the SuperLink
work that on a busy machine the clients would like to do."""


class FlowerTransport:
    """Carries messages to clients that have registered.

    Args:
        grid: Flower's grid.
        expected: Ids of the clients; all of them are waited for at first.
        timeout: Seconds a client may take to reply.
        registration_timeout: Seconds all clients may take to register.

    Raises:
        FederationError: If one of them does not register in time.
    """

    def __init__(
        self, grid: Grid, expected: Sequence[str], *, timeout: float = 60.0, registration_timeout: float = 300.0
    ) -> None:
        self._grid, self._timeout, self._expected = grid, timeout, tuple(expected)
        self._nodes: dict[str, int] = {}
        self._registered: dict[str, ClientDescription] = {}
        self._retry_at: dict[int, float] = {}
        self._registering: dict[str, int] = {}
        self._last_sent: dict[int, str] = {}
        self._prompt: set[int] = set()
        self._behind: set[int] = set()
        self._refusal = ""
        deadline = time.monotonic() + registration_timeout
        self._update_nodes()
        while missing := [client_id for client_id in self._expected if client_id not in self._nodes]:
            if time.monotonic() > deadline:
                raise FederationError(
                    f"client '{missing[0]}' did not register in {registration_timeout:g} s ({len(missing)} missing, "
                    f"{len(list(self._grid.get_node_ids()))} nodes connected).{self._refusal}"
                )
            time.sleep(POLL_SECONDS[0])
            self._update_nodes()

    def registrations(self) -> Sequence[ClientDescription]:
        """The clients that have registered."""
        return list(self._registered.values())

    def send_and_receive(self, message_type: MessageType, messages: Messages) -> Replies:
        """Send messages by client id; clients that do not answer in time are left out of the replies."""
        contents = {client_id: instruction_record(*content) for client_id, content in messages.items()}
        found = self.exchange(message_type, contents)
        return {client_id: reply if isinstance(reply, str) else _read(reply) for client_id, reply in found.items()}

    def exchange(
        self, message_type: MessageType | SumStage, contents: Mapping[str, RecordDict]
    ) -> Mapping[str, RecordDict | str]:
        """Carry a record to each of several clients, and bring back theirs.

        Args:
            message_type: What they are sent.
            contents: The records, by client id.

        Returns:
            By client id what it replied, or the reason of an error; clients that do not answer in time are left out.
        """
        self._update_nodes()
        self._find_behind()
        messages = [
            Message(content, self._nodes[client_id], flower_type(message_type))
            for client_id, content in contents.items()
            if client_id in self._nodes
        ]
        if not messages:
            return {}
        owner = {node: client_id for client_id, node in self._nodes.items()}
        waiting = self._push(messages)
        # A client's secrets of a sum are in its node's state, which messages beside each other overwrite.
        behind = set() if message_type in get_args(SumStage) else self._behind & set(waiting.values())
        nudged = self._send_register(behind)
        replies: dict[str, RecordDict | str] = {}
        began = time.monotonic()
        while waiting and (waited := time.monotonic() - began) < self._timeout:
            for node, reply in self._pull(waiting):
                replies[owner[node]] = str(reply.error.reason) if reply.has_error() else reply.content
            if waited >= PING_AFTER:
                nudged |= self._send_register(set(waiting.values()) - self._prompt - nudged)
            least, most = POLL_SECONDS
            time.sleep(min(max(least, waited / 10), most) if waiting else 0)
        return replies

    def _update_nodes(self) -> None:
        """Send `register` to new nodes, read the registrations that have come, and forget nodes that left.

        Nobody is waited for: a node may take long to start its app, and a client that crashed is listed for a while
        beside its successor.
        """
        online, now = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {client_id: node for client_id, node in self._nodes.items() if node in online}
        unknown = [n for n in sorted(online - set(self._nodes.values())) if self._retry_at.get(n, 0.0) <= now]
        self._registering = {message: node for message, node in self._registering.items() if node in online}
        self._last_sent = {node: message for node, message in self._last_sent.items() if node in online}
        self._prompt, self._behind = self._prompt & online, self._behind & online
        self._retry_at |= dict.fromkeys(self._send_register(unknown), now + PING_AFTER)
        self._read_registrations()

    def _read_registrations(self) -> None:
        for node, reply in self._pull(self._registering):
            if node in self._nodes.values():
                continue  # it has registered before
            try:
                found = self._accept(reply)
            except InputError as error:
                self._refusal = f" Node {node} is left out for now: {error}"
                log.warning(self._refusal.strip())
                self._retry_at[node] = time.monotonic() + RETRY_AFTER
                continue
            # The first registration counts: a client that comes back cannot make itself larger.
            self._registered.setdefault(found.client_id, found)
            self._nodes[found.client_id] = node

    def _find_behind(self) -> None:
        """Which nodes owe an answer to `register` and do not give it, though they have nothing else to do.

        A slow one is distinguished from these by waiting once: after another message it would be unclear which of the
        two the answer belongs to.
        """
        deadline = time.monotonic() + PING_AFTER / 2
        while doubtful := self._owing() - self._prompt - self._behind:
            if time.monotonic() >= deadline:
                self._behind |= doubtful
                return
            time.sleep(POLL_SECONDS[0])
            self._read_registrations()

    def _owing(self) -> set[int]:
        """Nodes of clients that were sent `register` again and have not answered it."""
        return set(self._registering.values()) & set(self._nodes.values())

    def _send_register(self, nodes: Collection[int]) -> set[int]:
        """Have nodes register; their replies are read when nodes are updated next."""
        if nodes:
            self._registering |= self._push([Message(RecordDict(), node, flower_type("register")) for node in nodes])
        return set(nodes)

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send; gives the node that each message went to, by the message's id."""
        sent = set(self._grid.push_messages(messages))
        pushed = {m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id in sent}
        self._last_sent |= {node: message for message, node in pushed.items()}
        return pushed

    def _pull(self, waiting: dict[str, int]) -> list[tuple[int, Message]]:
        """Replies that have come, with the nodes they are from; those are waited for no longer.

        A reply that was lost comes as an error from no node, so the message it replies to counts.
        """
        if not waiting:
            return []
        replies = self._grid.pull_messages(list(waiting))
        answered = {reply.metadata.reply_to_message_id for reply in replies if not reply.has_error()}
        prompt = {node for node, message in self._last_sent.items() if message in answered}
        self._prompt, self._behind = self._prompt | prompt, self._behind - prompt
        return [(waiting.pop(reply.metadata.reply_to_message_id), reply) for reply in replies]

    def _accept(self, reply: Message) -> ClientDescription:
        if reply.has_error():
            raise InputError(f"it could not register: {reply.error.reason}")
        found = read_registration(reply.content)
        if found.client_id not in self._expected:
            raise InputError(f"client {found.client_id} is not one of this federation.")
        if found.client_id in self._nodes:
            raise InputError(f"a second node registers as client {found.client_id}; give every client its own id.")
        return found


def _read(content: RecordDict) -> ClientReply | str:
    try:
        return read_reply(content)
    except InputError as error:
        return str(error)
