"""What server and clients say to each other in the four stages of a secure sum, checked on arrival.

| stage     | server says                  | client says                                      |
|-----------|------------------------------|--------------------------------------------------|
| advertise | `SetupRequest`                    | `PublicKeys`                                     |
| share     | `KeyBroadcast`                     | `SealedShares`, which only other clients can read |
| mask      | `ShareDelivery`, and what to do    | its masked vector, and its numbers               |
| unmask    | `SurvivorList`                  | `UnmaskShares`                                       |

Every letter of the server names the sum it belongs to.
"""

from typing import Any, Literal, TypeVar

from flwr.app import ConfigRecord, RecordDict

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Settings

RECORD = "sum"
LEAST = 2
"""Clients that a sum has at least: the sum of one is that one's vector."""


def majority(members: int) -> int:
    """The least threshold clients agree to.

    With more than half of them needed to reveal anything, a server that tells one half that a client is there, and the
    other half that it is not, cannot have both of its secrets revealed.
    """
    return max(LEAST, members // 2 + 1)


class SetupRequest(Settings):
    sum: str


class PublicKeys(Settings):
    """`seal` is for shares sent to this client, `mask` for the masks it has in common with others."""

    seal: bytes
    mask: bytes


class KeyBroadcast(Settings):
    """Everybody's public keys; `threshold` members are needed to reveal anything."""

    sum: str
    threshold: Count
    members: tuple[str, ...]
    seal_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]


class SealedShares(Settings):
    """Shares of a client's two secrets, one sealed pair for each of the others, and a hash of its own mask's seed."""

    commitment: bytes
    members: tuple[str, ...]
    shares: tuple[bytes, ...]


class ShareDelivery(Settings):
    """The shares that the others have sealed for a client, and what it is to add: `weight` × the `array` of its answer
    to a verb."""

    sum: str
    members: tuple[str, ...]
    shares: tuple[bytes, ...]
    verb: Literal["train", "backprop", "outer"]
    array: str
    weight: float


class SurvivorList(Settings):
    """Those whose masked vectors have arrived."""

    sum: str
    members: tuple[str, ...]


class UnmaskShares(Settings):
    """Shares of the survivors' own masks' seeds, and of the others' mask keys, in the order of their keys."""

    seeds: tuple[bytes, ...]
    keys: tuple[bytes, ...]


Letter = TypeVar("Letter", bound=Settings)


def to_config(letter: Settings) -> ConfigRecord:
    fields: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in letter.model_dump().items()
    }
    return ConfigRecord(fields)


def to_record(letter: Settings) -> RecordDict:
    return RecordDict({RECORD: to_config(letter)})


def read(record: RecordDict, kind: type[Letter]) -> Letter:
    if RECORD not in record.config_records:
        raise InputError(f"the record '{RECORD}' is missing.")
    return from_config(record.config_records[RECORD], kind)


def from_config(config: ConfigRecord, kind: type[Letter]) -> Letter:
    return kind(**dict(config))
