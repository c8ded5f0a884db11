"""The messages of the four stages of a secure sum, checked on arrival.

| stage     | from the server                           | from a client                                        |
|-----------|-------------------------------------------|------------------------------------------------------|
| advertise | `SetupRequest`                            | `PublicKeys`                                         |
| share     | `KeyBroadcast`                            | `EncryptedShares`, which only other clients can read |
| mask      | `ShareDelivery`, and an instruction       | its masked vector, and its numbers                   |
| unmask    | `SurvivorList`                            | `UnmaskShares`                                       |
"""

from typing import Any, Literal, TypeVar

from flwr.app import ConfigRecord, RecordDict

from fedunfold.core.settings import Count, Settings
from fedunfold.engines.flower.wire import entry

RECORD = "sum"
MIN_CLIENTS = 2
"""Clients that a sum has at least: the sum of one is that one's vector."""
SummedMessage = Literal["train", "vjp", "outer_loss", "evaluate"]
"""Messages whose replies have a vector that can be added up."""
Payload = TypeVar("Payload", bound=Settings)


def majority(members: int) -> int:
    """The least threshold clients agree to.

    With more than half of them needed to reveal anything, a server that tells one half that a client survived, and the
    other half that it dropped out, cannot have both of its secrets revealed.
    """
    return max(MIN_CLIENTS, members // 2 + 1)


class SetupRequest(Settings):
    """Begins a sum; every other message of the server names the sum too.

    Attributes:
        sum_id: Names it.
    """

    sum_id: str


class PublicKeys(Settings):
    """A client's public keys for one sum.

    Attributes:
        encryption: For shares that are sent to this client.
        mask: For the masks it has in common with others.
    """

    encryption: bytes
    mask: bytes


class KeyBroadcast(SetupRequest):
    """Everybody's public keys.

    Attributes:
        threshold: How many members are needed to reveal anything.
        members: Ids of the clients in it.
        encryption_keys: Theirs, in that order.
        mask_keys: Theirs, in that order.
    """

    threshold: Count
    members: tuple[str, ...]
    encryption_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]


class EncryptedShares(Settings):
    """Shares of a client's two secrets.

    Attributes:
        commitment: A hash of its own mask's seed.
        members: The other clients.
        shares: An encrypted pair for each of them.
    """

    commitment: bytes
    members: tuple[str, ...]
    shares: tuple[bytes, ...]


class ShareDelivery(SetupRequest):
    """The shares that the others have encrypted for a client, and what it is to add.

    Attributes:
        members: The other clients that have shared their secrets.
        shares: An encrypted pair from each of them.
        message_type: Which message it follows.
        array: Which array of its reply it adds.
        weight: What it multiplies that with.
    """

    members: tuple[str, ...]
    shares: tuple[bytes, ...]
    message_type: SummedMessage
    array: str
    weight: float


class SurvivorList(SetupRequest):
    """Those whose masked vectors have arrived.

    Attributes:
        members: Their ids.
    """

    members: tuple[str, ...]


class UnmaskShares(Settings):
    """What a survivor reveals, in the order of client ids.

    Attributes:
        seeds: Shares of the survivors' own masks' seeds.
        keys: Shares of the others' mask keys.
    """

    seeds: tuple[bytes, ...]
    keys: tuple[bytes, ...]


def to_config(payload: Settings) -> ConfigRecord:
    """A message, or a client's secrets, as one of Flower's records."""
    fields: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in payload.model_dump().items()
    }
    return ConfigRecord(fields)


def to_record(payload: Settings) -> RecordDict:
    """The content of a Flower message."""
    return RecordDict({RECORD: to_config(payload)})


def read(record: RecordDict, kind: type[Payload]) -> Payload:
    """What `to_record` wrote down."""
    return from_config(entry(record.config_records, RECORD), kind)


def from_config(config: ConfigRecord, kind: type[Payload]) -> Payload:
    """What `to_config` wrote down."""
    return kind(**dict(config))
