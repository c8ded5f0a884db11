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


class FlowerChannel:
    """Waits until `expected` clients have registered, then carries messages; `timeout` seconds for an answer."""

    def __init__(self, grid: Grid, expected: int, *, timeout: float = 60.0, patience: float = 300.0) -> None:
        self._grid, self._timeout = grid, timeout
        self._nodes: dict[str, int] = {}
        self._registered: dict[str, Registration] = {}
        self._strangers: set[int] = set()
        deadline = time.monotonic() + patience
        self._meet()
        while len(self._nodes) < expected:
            if time.monotonic() > deadline:
                raise InputError(f"only {len(self._nodes)} of {expected} clients registered in {patience:g} s.")
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
        """Ask nodes not seen before who they are; forget those that left."""
        online = set(self._grid.get_node_ids())
        self._nodes = {key: node for key, node in self._nodes.items() if node in online}
        unknown = online - set(self._nodes.values()) - self._strangers
        if not unknown:
            return
        asked = [Message(RecordDict(), node, MESSAGE_TYPES["register"]) for node in sorted(unknown)]
        for reply in self._grid.send_and_receive(asked, timeout=self._timeout):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise InputError(f"a node could not register: {reply.error.reason}")
                found = read_registration(reply.content)
                if found.key in self._nodes:
                    raise InputError(f"a second node registers as client {found.key}; give every client its own key.")
            except InputError as error:
                self._strangers.add(node)
                log.warning("node %d is left out: %s", node, error)
                continue
            # What counts is said once: a client that comes back cannot make itself larger.
            self._registered.setdefault(found.key, found)
            self._nodes[found.key] = node


def _read(reply: Message) -> Reply | str:
    if reply.has_error():
        return str(reply.error.reason)
    try:
        return read_reply(reply.content)
    except InputError as error:
        return str(error)
