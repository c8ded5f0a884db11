"""The messages of the five stages of a secure sum, checked on arrival.

| stage     | from the server                           | from a client                                          |
|-----------|-------------------------------------------|--------------------------------------------------------|
| advertise | `SetupRequest`                            | `PublicKeys`, signed                                   |
| share     | `KeyBroadcast`                            | `EncryptedShares`, which only its neighbours can read  |
| mask      | `ShareDelivery`, and an instruction       | its masked vector, and its numbers                     |
| confirm   | `SurvivorList`                            | `Confirmation`: its signature under what is added up   |
| unmask    | `Confirmations`                           | `UnmaskShares`                                         |
"""

from typing import Any, Literal, TypeVar

from flwr.app import ConfigRecord, RecordDict

from fedunfold.core.settings import Natural, Settings
from fedunfold.engines.flower.secagg.graph import two_thirds
from fedunfold.engines.flower.wire import entry

RECORD = "sum"
MIN_CLIENTS = 2
"""Clients that a sum has at least: the sum of one is that one's vector."""
SummedMessage = Literal["train", "vjp", "outer_loss", "evaluate"]
"""Messages whose replies have a vector that can be added up."""
Payload = TypeVar("Payload", bound=Settings)


def threshold(members: int) -> int:
    """How many members are needed to reveal anything: more than two thirds, and at least two."""
    return max(MIN_CLIENTS, two_thirds(members))


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
        signature: The site's, under the sum, its name and both keys; empty where it has no key to sign with.
        recorded: How many sums it has on record.
    """

    encryption: bytes
    mask: bytes
    signature: bytes = b""
    recorded: Natural = 0


class KeyBroadcast(SetupRequest):
    """Everybody's public keys.

    Attributes:
        members: Ids of the clients in it.
        encryption_keys: Theirs, in that order.
        mask_keys: Theirs, in that order.
        signatures: Theirs under these keys, in that order.
    """

    members: tuple[str, ...]
    encryption_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]
    signatures: tuple[bytes, ...]


class EncryptedShares(Settings):
    """Shares of a client's two secrets.

    Attributes:
        commitment: A hash of its own mask's seed.
        members: Its neighbours.
        shares: An encrypted pair for each of them.
    """

    commitment: bytes
    members: tuple[str, ...]
    shares: tuple[bytes, ...]


class ShareDelivery(SetupRequest):
    """The shares that its neighbours have encrypted for a client, and what everybody is to add.

    Attributes:
        members: All that have shared their secrets, this client too.
        terms: What each of them adds, as "train:updates".
        scales: By how much each of these counts (`statements.scale_of`).
        senders: The client's neighbours among them.
        shares: An encrypted pair from each of these.
        message_type: Which message the client follows.
        array: Which array of its reply it adds.
        weight: What it multiplies that with.
    """

    members: tuple[str, ...]
    terms: tuple[str, ...]
    scales: tuple[float, ...]
    senders: tuple[str, ...]
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


class Confirmation(Settings):
    """That a survivor has seen a list of survivors.

    Attributes:
        signature: The site's, under everything that the sum is about; empty where it has no key to sign with.
    """

    signature: bytes = b""


class Confirmations(SetupRequest):
    """Who has confirmed the list of survivors.

    Attributes:
        members: Their ids.
        signatures: Theirs.
    """

    members: tuple[str, ...]
    signatures: tuple[bytes, ...]


class UnmaskShares(Settings):
    """What a survivor reveals of its neighbours and itself, in the order of client ids.

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
