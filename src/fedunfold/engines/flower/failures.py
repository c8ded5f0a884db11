"""What went wrong with clients, counted."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from fedunfold.core.errors import InputError

Received = TypeVar("Received")
Accepted = TypeVar("Accepted")

FailureKind = Literal["no answer", "failed", "rejected"]
"""A client did not answer in time, answered with an error, or sent something that cannot be used."""

log = logging.getLogger("fedunfold")


@dataclass
class Failures:
    """Failures of clients over a whole run; every one is logged when it happens.

    Attributes:
        counts: How often each kind of failure happened to each client.

    >>> failures = Failures()
    >>> failures.add("hospital-a", "no answer", "round 3")
    >>> failures.as_dict()
    {'hospital-a': {'no answer': 1}}
    """

    counts: Counter[tuple[str, FailureKind]] = field(default_factory=Counter)

    def add(self, client_id: str, kind: FailureKind, detail: str) -> None:
        """Count and log a failure.

        Args:
            client_id: The client.
            kind: What kind of failure it is.
            detail: When it happened and why, for the log.
        """
        self.counts[client_id, kind] += 1
        log.warning("client %s: %s (%s)", client_id, kind, detail)

    def accept_replies(
        self,
        replies: Mapping[str, Received | str],
        client_ids: Iterable[str],
        about: str,
        read: Callable[[Received, str], Accepted],
        rejected: dict[str, str] | None = None,
    ) -> dict[str, Accepted]:
        """Read the replies that can be read, and count the rest.

        Args:
            replies: By client; a text is the reason why there is none.
            client_ids: Who was sent a message.
            about: What it was about, for the log.
            read: Makes something of a client's reply, or refuses it by an `InputError`.
            rejected: Where the reasons of refusals are added, by client.

        Returns:
            What `read` made, in the order of `client_ids`.
        """
        accepted = {}
        for client_id in client_ids:
            reply = replies.get(client_id)
            if reply is None:
                self.add(client_id, "no answer", about)
            elif isinstance(reply, str):
                self.add(client_id, "failed", reply)
            else:
                try:
                    accepted[client_id] = read(reply, client_id)
                except InputError as error:
                    self.add(client_id, "rejected", f"{about}: {error}")
                    if rejected is not None:
                        rejected[client_id] = str(error)
        return accepted

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Counts by client and kind."""
        found: dict[str, dict[str, int]] = {}
        for (client_id, kind), count in sorted(self.counts.items()):
            found.setdefault(client_id, {})[kind] = count
        return found
