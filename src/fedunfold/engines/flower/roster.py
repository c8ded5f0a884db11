"""Which clients a Flower strategy has met: by the id of a node, and by a client's own once it has told it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.wire import REGISTRATION, read_registration


@dataclass
class Roster:
    """The clients that have answered, in the order they were first seen in.

    Attributes:
        num_examples: N_k by client: what it registered first, or, where it has not registered, reported last.
        nodes: Ids of registered clients by the nodes they are connected as.
        registered: Clients that have registered, connected or not.
        label_counts: How many samples of each class they registered first.
        connected: In which round each client was last connected.

    >>> roster = Roster()
    >>> roster.name(7)
    'node:7'
    """

    num_examples: dict[str, float] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    label_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    connected: dict[str, int] = field(default_factory=dict)

    def name(self, node: int) -> str:
        """A client's id, or one made of its node's; no client can register one with a colon."""
        return self.nodes.get(node, f"node:{node}")

    def note_connected(self, online: Collection[int], t: int) -> None:
        """Which nodes are connected before round t; clients of those that have left may come back as others."""
        self.nodes = {node: client_id for node, client_id in self.nodes.items() if node in online}
        self.connected |= dict.fromkeys(map(self.name, online), t)

    def forget(self, before: int) -> list[str]:
        """Forget clients without a lasting id whose nodes left before some round; gives their names."""
        gone = [
            name
            for name in self.num_examples
            if name not in self.registered and self.connected.get(name, before) < before
        ]
        self.num_examples = {name: count for name, count in self.num_examples.items() if name not in gone}
        self.connected = {name: t for name, t in self.connected.items() if t >= before or name in self.num_examples}
        return gone

    def identify(self, node: int, content: RecordDict) -> str | None:
        """Read a client's registration, where its reply brings one.

        Args:
            node: Where the reply comes from.
            content: The reply.

        Returns:
            The name it had before, where its client turns out to be one that was known already: that name is over.

        Raises:
            InputError: Another node is connected as that client, or this one was connected as another.
        """
        if REGISTRATION not in content.config_records:
            return None
        found, before = read_registration(content, REGISTRATION), self.name(node)
        if found.client_id == before:
            return None
        if node in self.nodes:
            raise InputError(f"registers as client {found.client_id}, after it was client {before}")
        if found.client_id in self.nodes.values():
            raise InputError(f"registers as client {found.client_id}, which another node is connected as")
        self.nodes[node] = found.client_id
        if found.client_id in self.registered:
            return before if before in self.num_examples else None
        # In its place: the server's memory goes by position.
        renamed = {found.client_id if name == before else name: n for name, n in self.num_examples.items()}
        # The first registration counts: a client that comes back cannot make itself larger.
        self.num_examples = renamed | {found.client_id: found.num_examples}
        self.registered.add(found.client_id)
        self.label_counts[found.client_id] = found.label_counts
        return None

    def label_counts_of(self, client_ids: Sequence[str]) -> Tensor | None:
        """Those of all these clients, [K, C]; None where some have not registered, or other numbers of classes."""
        found = [self.label_counts.get(client_id, ()) for client_id in client_ids]
        return torch.tensor(found) if len({len(counts) for counts in found}) == 1 else None

    def report_examples(self, client_id: str, count: float) -> None:
        """What a client says in a reply; it counts unless the client has registered."""
        if client_id not in self.registered:
            self.num_examples[client_id] = count
