"""Messages to clients over a Flower grid, by client key.

Node ids change when a SuperNode restarts; keys do not. A node that is new is asked who it is before anything
else, and a client that comes back under another id is taken back.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.schema import (
    Arrays,
    ClientDescription,
    ClientReply,
    MessageType,
    SumStage,
    TrainInstruction,
)
from fedunfold.engines.flower.server import Answers
from fedunfold.engines.flower.wire import MESSAGE_TYPES, assignment_record, read_registration, read_reply

log = logging.getLogger("fedunfold")


ASK_AGAIN = 10.0
"""Seconds after which a node that was left out is asked again who it is."""
PING_AFTER = 20.0
"""Seconds of silence after which a node is sent a question beside what it was asked: a SuperNode whose server was
killed amid a message stays one answer behind, and gives the last one only when it gets something new."""
POLL = (0.1, 1.0)
"""Least and most seconds between two looks for answers: a tenth of the wait so far, for every look costs the SuperLink
work that on a busy machine the clients would like to do."""


class FlowerChannel:
    """Waits until the expected clients have registered, then carries messages; `timeout` seconds for an answer."""

    def __init__(self, grid: Grid, expected: Sequence[str], *, timeout: float = 60.0, patience: float = 300.0) -> None:
        self._grid, self._timeout, self._expected = grid, timeout, tuple(expected)
        self._nodes: dict[str, int] = {}
        self._registered: dict[str, ClientDescription] = {}
        self._ask_again: dict[int, float] = {}
        self._asked: dict[str, int] = {}
        self._refused = ""
        deadline = time.monotonic() + patience
        self._meet()
        while missing := [key for key in self._expected if key not in self._nodes]:
            if time.monotonic() > deadline:
                raise InputError(
                    f"client '{missing[0]}' did not register in {patience:g} s ({len(missing)} missing, "
                    f"{len(list(self._grid.get_node_ids()))} nodes there).{self._refused}"
                )
            time.sleep(POLL[0])
            self._meet()

    def registrations(self) -> Sequence[ClientDescription]:
        return list(self._registered.values())

    def ask(self, verb: MessageType, messages: Mapping[str, tuple[TrainInstruction, Arrays]]) -> Answers:
        found = self.exchange(verb, {key: assignment_record(*content) for key, content in messages.items()})
        return {key: answer if isinstance(answer, str) else _read(answer) for key, answer in found.items()}

    def exchange(
        self, verb: MessageType | SumStage, messages: Mapping[str, RecordDict]
    ) -> Mapping[str, RecordDict | str]:
        """Carry a record to each of several clients, by key, and bring back theirs, or the reason of an error."""
        self._meet()
        sent = [
            Message(content, self._nodes[key], MESSAGE_TYPES[verb])
            for key, content in messages.items()
            if key in self._nodes
        ]
        if not sent:
            return {}
        owner = {node: key for key, node in self._nodes.items()}
        behind = set(self._asked.values())
        waiting = self._push(sent)
        # A client's secrets of a sum are in its node's state, which messages beside each other overwrite.
        nudged = set() if verb in get_args(SumStage) else self._question(behind & set(waiting.values()))
        answers: dict[str, RecordDict | str] = {}
        began = time.monotonic()
        while waiting and (waited := time.monotonic() - began) < self._timeout:
            for node, reply in self._pull(waiting):
                answers[owner[node]] = str(reply.error.reason) if reply.has_error() else reply.content
            if waited >= PING_AFTER:
                nudged |= self._question(set(waiting.values()) - nudged)
            time.sleep(min(max(POLL[0], waited / 10), POLL[1]) if waiting else 0)
        return answers

    def _meet(self) -> None:
        """Ask nodes that are not known who they are, and hear those that answer by now; forget those that left.

        Nobody is waited for: a node may take long to start its app, and a client that crashed is listed for a while
        beside its successor.
        """
        online, now = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {key: node for key, node in self._nodes.items() if node in online}
        unknown = [n for n in sorted(online - set(self._nodes.values())) if self._ask_again.get(n, 0.0) <= now]
        self._asked = {id: node for id, node in self._asked.items() if node in online}
        self._ask_again |= dict.fromkeys(self._question(unknown), now + PING_AFTER)
        for node, reply in self._pull(self._asked):
            if node in self._nodes.values():
                continue  # it has said so before
            try:
                found = self._accepted(reply)
            except InputError as error:
                self._refused = f" Node {node} is left out for now: {error}"
                log.warning(self._refused.strip())
                self._ask_again[node] = now + ASK_AGAIN
                continue
            # What counts is said once: a client that comes back cannot make itself larger.
            self._registered.setdefault(found.key, found)
            self._nodes[found.key] = node

    def _question(self, nodes: Collection[int]) -> set[int]:
        """Ask nodes who they are; the answers are heard when next there is a meeting."""
        if nodes:
            self._asked |= self._push([Message(RecordDict(), node, MESSAGE_TYPES["register"]) for node in nodes])
        return set(nodes)

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send; gives the node that each message went to, by the message's id."""
        sent = set(self._grid.push_messages(messages))
        return {m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id in sent}

    def _pull(self, waiting: dict[str, int]) -> list[tuple[int, Message]]:
        """Answers that have come, with the nodes that were asked; those are waited for no longer.

        An answer that was lost on its way comes as an error from nowhere, so the message it answers counts.
        """
        if not waiting:
            return []
        replies = self._grid.pull_messages(list(waiting))
        return [(waiting.pop(reply.metadata.reply_to_message_id), reply) for reply in replies]

    def _accepted(self, reply: Message) -> ClientDescription:
        if reply.has_error():
            raise InputError(f"it could not register: {reply.error.reason}")
        found = read_registration(reply.content)
        if found.key not in self._expected:
            raise InputError(f"client {found.key} is not one of this federation.")
        if found.key in self._nodes:
            raise InputError(f"a second node registers as client {found.key}; give every client its own key.")
        return found


def _read(content: RecordDict) -> ClientReply | str:
    try:
        return read_reply(content)
    except InputError as error:
        return str(error)
