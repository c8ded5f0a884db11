"""The messages of a secure sum, and a client's and the server's next step with them."""

import random
from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np

from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.server import _read_keys
from tests.fuzz.formats.flower_messages import mutate, on_wire, record_of
from tests.fuzz.judging import understood_by_any
from tests.support.site_keys import identity

__all__ = ["fuzz", "mutate", "seeds"]

KEYS = ("a", "b", "c")
VECTOR = np.linspace(-1, 1, 5)


@cache
def _begun() -> tuple[Secrets, Secrets, protocol.KeyBroadcast, protocol.ShareDelivery]:
    """Client a before it shares, after it has, and what it is sent then."""
    members = {key: _member(key) for key in KEYS}
    opened = {key: member.advertise(protocol.SetupRequest(sum_id="s")) for key, member in members.items()}
    broadcast = protocol.KeyBroadcast(
        sum_id="s",
        members=KEYS,
        encryption_keys=tuple(public.encryption for _, public in opened.values()),
        mask_keys=tuple(public.mask for _, public in opened.values()),
        signatures=tuple(public.signature for _, public in opened.values()),
    )
    shared = {key: members[key].share(secrets, broadcast) for key, (secrets, _) in opened.items()}
    encrypted = {key: dict(zip(found.members, found.shares, strict=True)) for key, (_, found) in shared.items()}
    shares = (encrypted["b"]["a"], encrypted["c"]["a"])
    delivery = protocol.ShareDelivery(
        sum_id="s",
        members=KEYS,
        terms=("train:updates",) * 3,
        scales=(0.5,) * 3,
        senders=("b", "c"),
        shares=shares,
        message_type="train",
        array="updates",
        weight=0.5,
    )
    return opened["a"][0], shared["a"][0], broadcast, delivery


def _member(key: str) -> SecAggClient:
    return SecAggClient(key, identity(key, KEYS))


def _masked(shared: Secrets, delivery: protocol.ShareDelivery) -> Secrets:
    return _member("a").mask(shared, delivery, lambda: VECTOR, scale=0.5, request=b"alike")[0]


def fuzz(data: bytes) -> bool:
    record = record_of(data)
    if record is None:
        return False
    advertised, shared, _, delivery = _begun()
    member, masked = _member("a"), _masked(shared, delivery)
    confirmed = member.confirm(masked, protocol.SurvivorList(sum_id="s", members=KEYS))[0]
    steps: tuple[Callable[[], object], ...] = (
        lambda: member.advertise(protocol.read(record, protocol.SetupRequest)),
        lambda: member.share(advertised, protocol.read(record, protocol.KeyBroadcast)),
        lambda: _masked(shared, protocol.read(record, protocol.ShareDelivery)),
        lambda: member.confirm(masked, protocol.read(record, protocol.SurvivorList)),
        lambda: member.unmask(confirmed, protocol.read(record, protocol.Confirmations)),
        lambda: _read_keys(record, "a"),
        partial(protocol.read, record, protocol.EncryptedShares),
        partial(protocol.read, record, protocol.Confirmation),
        partial(protocol.read, record, protocol.UnmaskShares),
    )
    names = (
        "field ",
        "client 'a'",
        "record",
        "has ",
        "advertises",
        "SetupRequest",
        "PublicKeys",
        "KeyBroadcast",
        "EncryptedShares",
    )
    others = ("ShareDelivery", "SurvivorList", "Confirmation", "UnmaskShares")
    return understood_by_any(steps, *names, *others)


def seeds() -> Mapping[str, bytes]:
    """With keys of their own: `fuzz` has others, so a broadcast or delivery is refused, but only for that."""
    rng = random.Random(0)
    _, _, broadcast, delivery = _begun()
    keys = protocol.PublicKeys(encryption=broadcast.encryption_keys[0], mask=broadcast.mask_keys[0])
    encrypted = protocol.EncryptedShares(commitment=rng.randbytes(32), members=("b", "c"), shares=delivery.shares)
    made = {
        "setup": protocol.SetupRequest(sum_id="s"),
        "keys": keys,
        "survivors": protocol.SurvivorList(sum_id="s", members=KEYS),
        "confirmation": protocol.Confirmation(signature=rng.randbytes(70)),
        "refused-confirmations": protocol.Confirmations(
            sum_id="s", members=KEYS, signatures=tuple(rng.randbytes(70) for _ in KEYS)
        ),
        "encrypted": encrypted,
        "revealed": protocol.UnmaskShares(seeds=(b"1" * 33, b"2" * 33), keys=(b"3" * 49,)),
        "refused-broadcast": broadcast,
        "refused-delivery": delivery,
    }
    return {name: on_wire(protocol.to_record(payload)) for name, payload in made.items()}
