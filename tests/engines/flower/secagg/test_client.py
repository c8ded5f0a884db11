"""What a client refuses, whatever the server says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import (
    KeyBroadcast,
    SealedShares,
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

    roster: KeyBroadcast
    secrets: dict[str, Secrets]
    shares: dict[str, SealedShares]

    @classmethod
    def begun(cls, sum_id: str = "sum-1") -> "Sum":
        advertised = {key: SecAggClient(key).advertise(SetupRequest(sum=sum_id)) for key in KEYS}
        roster = KeyBroadcast(
            sum=sum_id,
            threshold=3,
            members=KEYS,
            seal_keys=tuple(keys.seal for _, keys in advertised.values()),
            mask_keys=tuple(keys.mask for _, keys in advertised.values()),
        )
        shared = {key: SecAggClient(key).share(secrets, roster) for key, (secrets, _) in advertised.items()}
        return cls(roster, {k: s for k, (s, _) in shared.items()}, {k: found for k, (_, found) in shared.items()})

    def delivery(self, key: str = "a", **changes: Any) -> ShareDelivery:
        embed_checksum = {
            k: dict(zip(f.members, f.shares, strict=True))[key] for k, f in self.shares.items() if k != key
        }
        delivery = ShareDelivery(
            sum=self.roster.sum,
            members=tuple(embed_checksum),
            shares=tuple(embed_checksum.values()),
            verb="train",
            array="updates",
            weight=1.0,
        )
        return delivery.model_copy(update=changes)

    def masked(self, key: str = "a") -> Secrets:
        return SecAggClient(key).mask(self.secrets[key], self.delivery(key), VECTOR)[0]


def survivors(*members: str) -> SurvivorList:
    return SurvivorList(sum="sum-1", members=members)


def test_it_never_reveals_both_secrets_of_a_client() -> None:
    kept = Sum.begun().masked()
    held = dict(zip(kept.senders, zip(kept.seed_shares, kept.key_shares, strict=True), strict=True))
    revealed = SecAggClient("a").unmask(kept, survivors("a", "b", "c"))
    assert revealed.seeds == (kept.own_seed_share, held["b"][0], held["c"][0])
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
        lambda: member.share(shared, begun.roster),
        lambda: member.share(masked, begun.roster),
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


def change_roster(roster: KeyBroadcast, **changes: Any) -> KeyBroadcast:
    return roster.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 2}, "where 3 to 5 of them are needed to reveal it, not 2"),
        ({"threshold": 6}, "not 6"),
        ({"members": ("a", "b", "c", "d", "d")}, "the same name or key"),
        ({"members": ("x", "b", "c", "d", "e")}, "not in the sum with its own keys"),
    ],
)
def test_rosters_it_does_not_take_part_in(changes: dict[str, Any], message: str) -> None:
    begun = Sum.begun()
    secrets = begun.secrets["a"].then(stage="advertised")
    with pytest.raises(InputError, match=message):
        SecAggClient("a").share(secrets, change_roster(begun.roster, **changes))


def test_one_key_under_two_names() -> None:
    begun = Sum.begun()
    keys = begun.roster.mask_keys
    secrets = begun.secrets["a"].then(stage="advertised")
    with pytest.raises(InputError, match="the same name or key"):
        SecAggClient("a").share(secrets, change_roster(begun.roster, mask_keys=(*keys[:4], keys[3])))


def test_alone_it_adds_nothing_up() -> None:
    member = SecAggClient("a")
    secrets, keys = member.advertise(SetupRequest(sum="sum-1"))
    roster = KeyBroadcast(sum="sum-1", threshold=1, members=("a",), seal_keys=(keys.seal,), mask_keys=(keys.mask,))
    with pytest.raises(InputError, match="a sum of 1 where 2 to 1 of them"):
        member.share(secrets, roster)
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
    with pytest.raises(InputError, match="cannot open the shares that come as client 'b's"):
        SecAggClient("a").mask(begun.secrets["a"], swapped, VECTOR)


def test_a_vector_beyond_the_bound_is_not_sent() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="beyond ±65536"):
        SecAggClient("a").mask(begun.secrets["a"], begun.delivery(), np.full(3, 1e9))


def test_as_many_shares_and_keys_as_members() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="one pair of shares from each"):
        SecAggClient("a").mask(begun.secrets["a"], begun.delivery(shares=begun.delivery().shares[:-1]), VECTOR)
    secrets, _ = SecAggClient("a").advertise(SetupRequest(sum="sum-1"))
    short = begun.roster.model_copy(update={"seal_keys": begun.roster.seal_keys[:-1]})
    with pytest.raises(InputError, match="pair of keys for each"):
        SecAggClient("a").share(secrets, short)
