"""What a client refuses, whatever the server says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.policy import SitePolicy
from fedunfold.engines.flower.secagg.protocol import (
    Confirmation,
    Confirmations,
    EncryptedShares,
    KeyBroadcast,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    threshold,
)
from tests.support.site_keys import identity

KEYS = ("a", "b", "c", "d", "e")
VECTOR = np.arange(3.0)
REQUEST = b"the same model for all"


def member(key: str, **policy: Any) -> SecAggClient:
    return SecAggClient(key, identity(key, KEYS), SitePolicy(**policy))


@dataclass
class Sum:
    """Five clients in one sum, up to where all have shared their keys."""

    broadcast: KeyBroadcast
    secrets: dict[str, Secrets]
    shares: dict[str, EncryptedShares]

    @classmethod
    def begun(cls, sum_id: str = "sum-1") -> "Sum":
        advertised = {key: member(key).advertise(SetupRequest(sum_id=sum_id)) for key in KEYS}
        broadcast = KeyBroadcast(
            sum_id=sum_id,
            members=KEYS,
            encryption_keys=tuple(keys.encryption for _, keys in advertised.values()),
            mask_keys=tuple(keys.mask for _, keys in advertised.values()),
            signatures=tuple(keys.signature for _, keys in advertised.values()),
        )
        shared = {key: member(key).share(secrets, broadcast) for key, (secrets, _) in advertised.items()}
        return cls(broadcast, {k: s for k, (s, _) in shared.items()}, {k: found for k, (_, found) in shared.items()})

    def delivery(self, key: str = "a", **changes: Any) -> ShareDelivery:
        encrypted = {k: dict(zip(f.members, f.shares, strict=True))[key] for k, f in self.shares.items() if k != key}
        delivery = ShareDelivery(
            sum_id=self.broadcast.sum_id,
            members=KEYS,
            terms=("train:updates",) * 5,
            scales=(1.0,) * 5,
            senders=tuple(encrypted),
            shares=tuple(encrypted.values()),
            message_type="train",
            array="updates",
            weight=1.0,
        )
        return delivery.model_copy(update=changes)

    def mask(self, key: str = "a", delivery: ShareDelivery | None = None, **policy: Any) -> Secrets:
        delivery = self.delivery(key) if delivery is None else delivery
        return masked(member(key, **policy), self.secrets[key], delivery)

    def confirmed(self, *left: str) -> tuple[Secrets, Confirmations]:
        """What a remembers then, and what it is sent, where all of these have confirmed the same."""
        signed = {key: member(key).confirm(self.mask(key), survivors(*left)) for key in left}
        signatures = tuple(found.signature for _, found in signed.values())
        return signed["a"][0], Confirmations(sum_id=self.broadcast.sum_id, members=left, signatures=signatures)


def masked(who: SecAggClient, secrets: Secrets | None, delivery: ShareDelivery, vector: Any = VECTOR) -> Secrets:
    return who.mask(secrets, delivery, lambda: vector, scale=1.0, request=REQUEST)[0]


def survivors(*members: str) -> SurvivorList:
    return SurvivorList(sum_id="sum-1", members=members)


def test_it_never_reveals_both_secrets_of_a_client() -> None:
    secrets, confirmations = Sum.begun().confirmed("a", "b", "c", "d")
    held = dict(zip(secrets.senders, zip(secrets.seed_shares, secrets.key_shares, strict=True), strict=True))
    revealed = member("a").unmask(secrets, confirmations)
    assert revealed.seeds == (secrets.own_seed_share, held["b"][0], held["c"][0], held["d"][0])
    assert revealed.keys == (held["e"][1],)


def test_it_reveals_nothing_for_too_few() -> None:
    with pytest.raises(InputError, match="'a' confirms nothing: 3 members are left, and at least 4 are needed"):
        member("a").confirm(Sum.begun().mask(), survivors("a", "b", "c"))


@pytest.mark.parametrize("members", [("b", "c", "d", "e"), ("a", "b", "c", "d", "stranger")])
def test_survivors_are_itself_and_those_it_masked_with(members: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="not those it added its vector to"):
        member("a").confirm(Sum.begun().mask(), survivors(*members))


def test_a_member_named_twice_does_not_count_twice() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="3 members are left"):
        member("a").confirm(begun.mask(), survivors("a", "b", "c", "c"))
    secrets, confirmations = begun.confirmed("a", "b", "c", "d")
    twice = confirmations.model_copy(update={"members": ("a", "b", "c", "c")})
    with pytest.raises(InputError, match="reveals nothing: 3 have confirmed, and at least 4 have to"):
        member("a").unmask(secrets, twice)


@pytest.mark.parametrize("signature", [b"", b"nonsense"])
def test_it_reveals_nothing_for_a_list_that_was_not_signed(signature: bytes) -> None:
    secrets, confirmations = Sum.begun().confirmed("a", "b", "c", "d")
    forged = confirmations.model_copy(update={"signatures": (*confirmations.signatures[:3], signature)})
    with pytest.raises(InputError, match="'a' reveals nothing: 'd' has not confirmed the sum that it was told of"):
        member("a").unmask(secrets, forged)


@pytest.mark.parametrize(
    "changes", [{"survivors": KEYS}, {"content": b"another model"}, {"keys": b"other keys"}, {"sum_id": "sum-1b"}]
)
def test_a_signature_is_of_one_list_one_model_and_one_sum(changes: dict[str, Any]) -> None:
    """What any of the members saw otherwise, it has signed otherwise."""
    secrets, confirmations = Sum.begun().confirmed("a", "b", "c", "d")
    confirmations = confirmations.model_copy(update={"sum_id": changes.get("sum_id", "sum-1")})
    with pytest.raises(InputError, match="has not confirmed the sum that it was told of"):
        member("a").unmask(secrets.then(**changes), confirmations)


def test_confirmations_are_of_survivors() -> None:
    secrets, confirmations = Sum.begun().confirmed("a", "b", "c", "d")
    strange = confirmations.model_copy(update={"members": ("a", "b", "c", "e")})
    with pytest.raises(InputError, match="confirmations of others than the survivors"):
        member("a").unmask(secrets, strange)


def test_every_stage_is_done_once_and_in_order() -> None:
    begun = Sum.begun()
    who, shared, done = member("a"), begun.secrets["a"], begun.mask()
    confirmed, confirmations = begun.confirmed(*KEYS)
    for attempt in (
        lambda: who.share(shared, begun.broadcast),
        lambda: who.share(done, begun.broadcast),
        lambda: masked(who, done, begun.delivery()),  # the same masks on another vector
        lambda: who.confirm(shared, survivors(*KEYS)),
        lambda: who.confirm(confirmed, survivors("a", "b", "c", "d")),
        lambda: who.unmask(done, confirmations),
    ):
        with pytest.raises(InputError, match="every stage is done once, in order"):
            attempt()


def test_after_a_restart_or_for_another_sum_it_knows_nothing() -> None:
    begun = Sum.begun()
    for secrets in (None, Sum.begun("sum-2").secrets["a"]):
        with pytest.raises(InputError, match="'a' knows nothing of this sum"):
            masked(member("a"), secrets, begun.delivery())


def advertised(begun: Sum) -> Secrets:
    return begun.secrets["a"].then(stage="advertised")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": ("a", "b", "c", "d", "d")}, "the same name or key"),
        ({"members": ("x", "b", "c", "d", "e")}, "not in the sum with its own keys"),
        ({"members": ("a", "b", "c", "d", "x")}, "takes part with no 'x', who is not in its roster"),
        ({"members": ("a", "c", "b", "d", "e")}, "keys as client 'c's that 'c' has not signed for this sum"),
        ({"signatures": (b"",) * 5}, "keys as client 'a's that 'a' has not signed"),
    ],
)
def test_broadcasts_it_does_not_take_part_in(changes: dict[str, Any], message: str) -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match=message):
        member("a").share(advertised(begun), begun.broadcast.model_copy(update=changes))


def test_one_key_under_two_names() -> None:
    begun = Sum.begun()
    changes = {"mask_keys": (*begun.broadcast.mask_keys[:4], begun.broadcast.mask_keys[3])}
    with pytest.raises(InputError, match="the same name or key"):
        member("a").share(advertised(begun), begun.broadcast.model_copy(update=changes))


def test_keys_of_another_sum() -> None:
    """Signed by their site, but for a sum whose secrets may have been revealed."""
    begun, old = Sum.begun(), Sum.begun("sum-0").broadcast
    fields = ("encryption_keys", "mask_keys", "signatures")
    changes = {name: (*getattr(begun.broadcast, name)[:4], getattr(old, name)[4]) for name in fields}
    with pytest.raises(InputError, match="keys as client 'e's that 'e' has not signed for this sum"):
        member("a").share(advertised(begun), begun.broadcast.model_copy(update=changes))


def test_alone_it_adds_nothing_up() -> None:
    secrets, keys = member("a").advertise(SetupRequest(sum_id="sum-1"))
    broadcast = KeyBroadcast(
        sum_id="sum-1",
        members=("a",),
        encryption_keys=(keys.encryption,),
        mask_keys=(keys.mask,),
        signatures=(keys.signature,),
    )
    with pytest.raises(InputError, match="sums of at least 2 clients, not of 1"):
        member("a").share(secrets, broadcast)
    assert [threshold(n) for n in (1, 2, 3, 4, 5, 10)] == [2, 2, 3, 3, 4, 7]


def test_a_site_demands_more_members() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match=r"sums of at least 6 clients, not of 5 \(min-members\)"):
        member("a", min_members=6).share(advertised(begun), begun.broadcast)
    with pytest.raises(InputError, match=r"sums of at least 5 clients, not of 4 \(min-members\)"):
        member("a", min_members=5).confirm(begun.mask(min_members=5), survivors("a", "b", "c", "d"))


def test_too_few_others_have_shared() -> None:
    begun = Sum.begun()
    whole = begun.delivery()
    three: dict[str, Any] = {
        "terms": whole.terms[:3],
        "scales": whole.scales[:3],
        "senders": ("b", "c"),
        "shares": whole.shares[:2],
    }
    with pytest.raises(InputError, match="adds nothing up: 3 members are left, and at least 4 are needed"):
        begun.mask(delivery=begun.delivery(members=("a", "b", "c"), **three))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": ("b", "b", "c", "d", "e")}, "not to add its vector to those of other members"),
        ({"members": ("b", "c", "d", "e", "x")}, "not to add its vector to those of other members"),
        ({"senders": ("x", "c", "d", "e")}, "one pair of shares from each of its neighbours"),
        ({"terms": ("train:updates",) * 4}, "not told what each of the members adds"),
        ({"terms": ("vjp:adjoint",) * 5}, "something else than the members of the sum are told"),
        ({"scales": (0.9, 1.0, 1.0, 1.0, 1.0)}, "something else than the members of the sum are told"),
        ({"terms": ("train:updates",) * 4 + ("outer_loss:gradient",)}, "does not add outer_loss:gradient and train"),
        ({"scales": (1.0, 0.0, 0.1, 0.0, 0.1)}, r"nobody counts for more than 0.8 of all, not 0.833 \(max-share\)"),
        ({"scales": (1.0, 40.0, 1.0, 1.0, 1.0)}, r"not 0.909 \(max-share\)"),
        ({"scales": (1.0, -1.0, 1.0, 1.0, 1.0)}, "scales of a sum that are negative"),
    ],
)
def test_deliveries_it_does_not_take_part_in(changes: dict[str, Any], message: str) -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match=message):
        begun.mask(delivery=begun.delivery(**changes))


def test_nobody_counts_alone_among_those_left() -> None:
    """Where the heavier ones are said to be lost."""
    begun, scales = Sum.begun(), (1.0, 0.2, 0.2, 0.2, 2.0)
    secrets = masked(member("a", max_share=0.6), begun.secrets["a"], begun.delivery(scales=scales))
    with pytest.raises(InputError, match=r"not 0.625 \(max-share\)"):
        member("a", max_share=0.6).confirm(secrets, survivors("a", "b", "c", "d"))


def test_shares_of_another_client_or_for_another() -> None:
    begun = Sum.begun()
    whole = begun.delivery()
    swapped = begun.delivery(shares=(whole.shares[1], whole.shares[0], *whole.shares[2:]))
    with pytest.raises(InputError, match="cannot decrypt the shares that come as client 'b's"):
        begun.mask(delivery=swapped)


def test_a_vector_beyond_the_bound_is_not_sent() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="beyond ±65536"):
        masked(member("a"), begun.secrets["a"], begun.delivery(), np.full(3, 1e9))


def test_as_many_shares_and_keys_as_members() -> None:
    begun = Sum.begun()
    with pytest.raises(InputError, match="one pair of shares from each"):
        begun.mask(delivery=begun.delivery(shares=begun.delivery().shares[:-1]))
    short = begun.broadcast.model_copy(update={"encryption_keys": begun.broadcast.encryption_keys[:-1]})
    with pytest.raises(InputError, match="pair of signed keys for each"):
        member("a").share(advertised(begun), short)


def test_a_key_that_is_none() -> None:
    """A point of low order, with which everybody has the same in common."""
    begun = Sum.begun()
    zeros = (*begun.broadcast.encryption_keys[:4], bytes(32))
    unsigned = SecAggClient("a")
    with pytest.raises(InputError, match="cannot use the keys that come as client 'e's"):
        unsigned.share(advertised(begun), begun.broadcast.model_copy(update={"encryption_keys": zeros}))


def test_without_a_roster_nothing_is_signed() -> None:
    who = SecAggClient("a")
    assert who.advertise(SetupRequest(sum_id="sum-1"))[1].signature == b""
    assert who.confirm(Sum.begun().mask(), survivors(*KEYS))[1] == Confirmation(signature=b"")
