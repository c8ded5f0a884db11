"""The letters of a secure sum, and a client's and the server's next step with them."""

import random
from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np

from fedunfold.flower.secure import letters
from fedunfold.flower.secure.member import Member, Secrets
from fedunfold.flower.secure.summing import _read_keys
from tests.fuzz.formats.flower_messages import mutate, on_wire, record_of
from tests.fuzz.judging import understood_by_any

__all__ = ["fuzz", "mutate", "seeds"]

KEYS = ("a", "b", "c")
VECTOR = np.linspace(-1, 1, 5)


@cache
def _begun() -> tuple[Secrets, Secrets, letters.Roster, letters.Delivery]:
    """Client a before it shares, after it has, and what it is told then."""
    members = {key: Member(key) for key in KEYS}
    opened = {key: member.advertise(letters.Opening(sum="s")) for key, member in members.items()}
    roster = letters.Roster(
        sum="s",
        threshold=2,
        members=KEYS,
        seal_keys=tuple(public.seal for _, public in opened.values()),
        mask_keys=tuple(public.mask for _, public in opened.values()),
    )
    shared = {key: members[key].share(secrets, roster) for key, (secrets, _) in opened.items()}
    sealed = {key: dict(zip(found.members, found.shares, strict=True)) for key, (_, found) in shared.items()}
    shares = (sealed["b"]["a"], sealed["c"]["a"])
    delivery = letters.Delivery(sum="s", members=("b", "c"), shares=shares, verb="train", array="updates", weight=0.5)
    return opened["a"][0], shared["a"][0], roster, delivery


def fuzz(data: bytes) -> bool:
    record = record_of(data)
    if record is None:
        return False
    advertised, shared, _, delivery = _begun()
    member = Member("a")
    masked = member.mask(shared, delivery, VECTOR)[0]
    steps: tuple[Callable[[], object], ...] = (
        lambda: member.advertise(letters.read(record, letters.Opening)),
        lambda: member.share(advertised, letters.read(record, letters.Roster)),
        lambda: member.mask(shared, letters.read(record, letters.Delivery), VECTOR),
        lambda: member.unmask(masked, letters.read(record, letters.Survivors)),
        lambda: _read_keys(record, "a"),
        partial(letters.read, record, letters.SealedShares),
        partial(letters.read, record, letters.Revealed),
    )
    names = ("field ", "client 'a'", "record", "has ", "advertises", "Opening", "PublicKeys", "Roster", "SealedShares")
    return understood_by_any(steps, *names, "Delivery", "Survivors", "Revealed")


def seeds() -> Mapping[str, bytes]:
    """With keys of their own: `fuzz` has others, so a roster or delivery is refused, but only for that."""
    rng = random.Random(0)
    _, _, roster, delivery = _begun()
    keys = letters.PublicKeys(seal=roster.seal_keys[0], mask=roster.mask_keys[0])
    sealed = letters.SealedShares(commitment=rng.randbytes(32), members=("b", "c"), shares=delivery.shares)
    made = {
        "opening": letters.Opening(sum="s"),
        "keys": keys,
        "survivors": letters.Survivors(sum="s", members=KEYS),
        "sealed": sealed,
        "revealed": letters.Revealed(seeds=(b"1" * 33, b"2" * 33), keys=(b"3" * 49,)),
        "refused-roster": roster,
        "refused-delivery": delivery,
    }
    return {name: on_wire(letters.to_record(letter)) for name, letter in made.items()}
