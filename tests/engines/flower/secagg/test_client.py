"""What a client refuses, whatever the server says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import (
    EncryptedShares,
    KeyBroadcast,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    majority,
)

KEYS = ("a", "b", "c", "d", "e")
VECTOR = np.arange(3.0)


@dataclass
class Sum:
    """Five clients in one sum, up to where all have shared their keys."""

    broadcast: KeyBroadcast
    secrets: dict[str, Secrets]
    shares: dict[str, EncryptedShares]

    @classmethod
    def begun(cls, sum_id: str = "sum-1") -> "Sum":
        advertised = {key: SecAggClient(key).advertise(SetupRequest(sum_id=sum_id)) for key in KEYS}
        broadcast = KeyBroadcast(
            sum_id=sum_id,
            threshold=3,
            members=KEYS,
            encryption_keys=tuple(keys.encryption for _, keys in advertised.values()),
            mask_keys=tuple(keys.mask for _, keys in advertised.values()),
        )
        shared = {key: SecAggClient(key).share(secrets, broadcast) for key, (secrets, _) in advertised.items()}
        return cls(broadcast, {k: s for k, (s, _) in shared.items()}, {k: found for k, (_, found) in shared.items()})

    def delivery(self, key: str = "a", **changes: Any) -> ShareDelivery:
        encrypted = {k: dict(zip(f.members, f.shares, strict=True))[key] for k, f in self.shares.items() if k != key}
        delivery = ShareDelivery(
            sum_id=self.broadcast.sum_id,
            members=tuple(encrypted),
            shares=tuple(encrypted.values()),
            message_type="train",
            array="updates",
            weight=1.0,
        )
        return delivery.model_copy(update=changes)

    def masked(self, key: str = "a") -> Secrets:
        return SecAggClient(key).mask(self.secrets[key], self.delivery(key), VECTOR)[0]


def survivors(*members: str) -> SurvivorList:
    return SurvivorList(sum_id="sum-1", members=members)


def test_it_never_reveals_both_secrets_of_a_client() -> None:
    secrets = Sum.begun().masked()
    held = dict(zip(secrets.senders, zip(secrets.seed_shares, secrets.key_shares, strict=True), strict=True))
    revealed = SecAggClient("a").unmask(secrets, survivors("a", "b", "c"))
    assert revealed.seeds == (secrets.own_seed_share, held["b"][0], held["c"][0])
    assert revealed.keys == (held["d"][1], held["e"][1])


def test_it_reveals_nothing_for_too_few() -> None:
    with pytest.raises(InputError, match="'a' reveals nothing: 2 members are left, and at least 3 are needed"):
        SecAggClient("a").unmask(Sum.begun().masked(), survivors("a", "b"))


@pytest.mark.parametrize("members", [("b", "c", "d"), ("a", "b", "c", "stranger")])
def test_survivors_are_itself_and_those_it_masked_with(members: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="not those it added its vector to"):
        SecAggClient("a").unmask(Sum.begun().masked(), survivors(*members))


def test_a_member_named_twice_does_not_count_twice() -> None:
    with pytest.raises(InputError, match="2 members are left"):
        SecAggClient("a").unmask(Sum.begun().masked(), survivors("a", "b", "b"))


def test_every_stage_is_done_once_and_in_order() -> None:
    begun = Sum.begun()
    member, shared, masked = SecAggClient("a"), begun.secrets["a"], begun.masked()
    for attempt in (
        lambda: member.share(shared, begun.broadcast),
        lambda: member.share(masked, begun.broadcast),
        lambda: member.mask(masked, begun.delivery(), VECTOR),  # the same masks on another vector
        lambda: member.unmask(shared, survivors(*KEYS)),
    ):
        with pytest.raises(InputError, match="every stage is done once, in order"):
            attempt()


def test_after_a_restart_or_for_another_sum_it_knows_nothing() -> None:
    begun = Sum.begun()
    for secrets in (None, Sum.begun("sum-2").secrets["a"]):
        with pytest.raises(InputError, match="'a' knows nothing of this sum"):
            SecAggClient("a").mask(secrets, begun.delivery(), VECTOR)


def change_broadcast(broadcast: KeyBroadcast, **changes: Any) -> KeyBroadcast:
    return broadcast.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 2}, "where 3 to 5 of them are needed to reveal it, not 2"),
        ({"threshold": 6}, "not 6"),
        ({"members": ("a", "b", "c", "d", "d")}, "the same name or key"),
        ({"members": ("x", "b", "c", "d", "e")}, "not in the sum with its own keys"),
    ],
)
def test_broadcasts_it_does_not_take_part_in(changes: dict[str, Any], message: str) -> None:
    begun = Sum.begun()
    secrets = begun.secrets["a"].then(stage="advertised")
    with pytest.raises(InputError, match=message):
        SecAggClient("a").share(secrets, change_broadcast(begun.broadcast, **changes))


def test_one_key_under_two_names() -> None:
    begun = Sum.begun()
    keys = begun.broadcast.mask_keys
    secrets = begun.secrets["a"].then(stage="advertised")
    with pytest.raises(InputError, match="the same name or key"):
        SecAggClient("a").share(secrets, change_broadcast(begun.broadcast, mask_keys=(*keys[:4], keys[3])))


def test_alone_it_adds_nothing_up() -> None:
    member = SecAggClient("a")
    secrets, keys = member.advertise(SetupRequest(sum_id="sum-1"))
    broadcast = KeyBroadcast(
        sum_id="sum-1", threshold=1, members=("a",), encryption_keys=(keys.encryption,), mask_keys=(keys.mask,)
    )
    with pytest.raises(InputError, match="a sum of 1 where 2 to 1 of them"):
        member.share(secrets, broadcast)
    assert [majority(n) for n in (1, 2, 3, 4, 5, 10)] == [2, 2, 2, 3, 3, 6]


def test_too_few_others_have_shared() -> None:
    begun = Sum.begun()
    whole = begun.delivery()
    few = begun.delivery(members=whole.members[:1], shares=whole.shares[:1])
    with pytest.raises(InputError, match="at least 2 others, not of 1"):
        SecAggClient("a").mask(begun.secrets["a"], few, VECTOR)


def test_shares_from_nobody_it_knows() -> None:
    begun = Sum.begun()
    strange = begun.delivery(members=("x", "c", "d", "e"))
    with pytest.raises(InputError, match="from 'x', who is no other member"):
        SecAggClient("a").mask(begun.secrets["a"], strange, VECTOR)


def test_shares_of_another_client_or_for_another() -> None:
    begun = Sum.begun()
    whole = begun.delivery()
    swapped = begun.delivery(shares=(whole.shares[1], whole.shares[0], *whole.shares[2:]))
    with pytest.raises(InputError, match="cannot decrypt the shares that come as client 'b's"):
        SecAggClient("a").mask(begun.secrets["a"], swapped, VECTOR)


def test_a_vector_beyond_the_bound_is_not_sent() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="beyond ±65536"):
        SecAggClient("a").mask(begun.secrets["a"], begun.delivery(), np.full(3, 1e9))


def test_as_many_shares_and_keys_as_members() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="one pair of shares from each"):
        SecAggClient("a").mask(begun.secrets["a"], begun.delivery(shares=begun.delivery().shares[:-1]), VECTOR)
    secrets, _ = SecAggClient("a").advertise(SetupRequest(sum_id="sum-1"))
    short = begun.broadcast.model_copy(update={"encryption_keys": begun.broadcast.encryption_keys[:-1]})
    with pytest.raises(InputError, match="pair of keys for each"):
        SecAggClient("a").share(secrets, short)
