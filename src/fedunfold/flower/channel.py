"""Messages to clients over a Flower grid, by client key.

Node ids change when a SuperNode restarts; keys do not. A node that is new is asked who it is before anything
else, and a client that comes back under another id is taken back.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedunfold.errors import InputError
from fedunfold.flower.assignment import Arrays, Assignment, Registration, Reply, Verb
from fedunfold.flower.messages import MESSAGE_TYPES, assignment_record, read_registration, read_reply
from fedunfold.flower.remote import Answers

log = logging.getLogger("fedunfold")


ASK_AGAIN = 10.0
"""Seconds after which a node that could not register is asked again."""


class FlowerChannel:
    """Waits until the expected clients have registered, then carries messages; `timeout` seconds for an answer."""

    def __init__(self, grid: Grid, expected: Sequence[str], *, timeout: float = 60.0, patience: float = 300.0) -> None:
        self._grid, self._timeout, self._expected = grid, timeout, tuple(expected)
        self._nodes: dict[str, int] = {}
        self._registered: dict[str, Registration] = {}
        self._ask_again: dict[int, float] = {}
        deadline = time.monotonic() + patience
        self._meet()
        while missing := [key for key in self._expected if key not in self._nodes]:
            if time.monotonic() > deadline:
                raise InputError(f"client '{missing[0]}' did not register in {patience:g} s ({len(missing)} missing).")
            time.sleep(1)
            self._meet()

    def registrations(self) -> Sequence[Registration]:
        return list(self._registered.values())

    def ask(self, verb: Verb, messages: Mapping[str, tuple[Assignment, Arrays]]) -> Answers:
        self._meet()
        sent = [
            Message(assignment_record(*content), self._nodes[key], MESSAGE_TYPES[verb])
            for key, content in messages.items()
            if key in self._nodes
        ]
        if not sent:
            return {}
        owner = {node: key for key, node in self._nodes.items()}
        answers: dict[str, Reply | str] = {}
        for reply in self._grid.send_and_receive(sent, timeout=self._timeout):
            key = owner[reply.metadata.src_node_id]
            answers[key] = _read(reply)
        return answers

    def _meet(self) -> None:
        """Ask nodes that are not known who they are, from time to time; forget those that left."""
        online, now = set(self._grid.get_node_ids()), time.monotonic()
        self._nodes = {key: node for key, node in self._nodes.items() if node in online}
        unknown = [n for n in sorted(online - set(self._nodes.values())) if self._ask_again.get(n, 0.0) <= now]
        if not unknown:
            return
        # Taken for a failure until it answers: a client that crashed is listed for a while beside its successor.
        self._ask_again |= dict.fromkeys(unknown, now + ASK_AGAIN)
        asked = [Message(RecordDict(), node, MESSAGE_TYPES["register"]) for node in unknown]
        for reply in self._grid.send_and_receive(asked, timeout=min(self._timeout, ASK_AGAIN)):
            node = reply.metadata.src_node_id
            try:
                found = self._accepted(reply)
            except InputError as error:
                log.warning("node %d is left out for now: %s", node, error)
                continue
            # What counts is said once: a client that comes back cannot make itself larger.
            self._registered.setdefault(found.key, found)
            self._nodes[found.key] = node

    def _accepted(self, reply: Message) -> Registration:
        if reply.has_error():
            raise InputError(f"it could not register: {reply.error.reason}")
        found = read_registration(reply.content)
        if found.key not in self._expected:
            raise InputError(f"client {found.key} is not one of this federation.")
        if found.key in self._nodes:
            raise InputError(f"a second node registers as client {found.key}; give every client its own key.")
        return found


def _read(reply: Message) -> Reply | str:
    if reply.has_error():
        return str(reply.error.reason)
    try:
        return read_reply(reply.content)
    except InputError as error:
        return str(error)
