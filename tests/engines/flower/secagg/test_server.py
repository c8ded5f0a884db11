"""The secure sum is the plain one, whoever drops out, and what the server receives reveals nothing more."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.schema import SumStage
from fedunfold.engines.flower.secagg.fixed_point import encode, error_bound
from fedunfold.engines.flower.secagg.graph import reach
from fedunfold.engines.flower.secagg.keys import agree, mask_key
from fedunfold.engines.flower.secagg.masking import expand, pair_mask
from fedunfold.engines.flower.secagg.protocol import (
    EncryptedShares,
    PublicKeys,
    UnmaskShares,
    read,
    threshold,
    to_record,
)
from fedunfold.engines.flower.wire import read_reply
from tests.support.secagg_room import Room, add_up

STAGES: list[SumStage] = ["advertise", "share", "mask", "confirm", "unmask"]


def vectors(count: int, length: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    return {f"site-{k}": stream.normal(size=length) for k in range(count)}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), count=st.integers(2, 7), length=st.integers(1, 50))
def test_the_sum_over_those_who_got_through(data: st.DataObject, count: int, length: int) -> None:
    scale = data.draw(st.sampled_from([1e-6, 1.0, 1e4]))
    given = {key: scale * v for key, v in vectors(count, length, data.draw(st.integers(0, 99))).items()}
    lost = data.draw(st.dictionaries(st.sampled_from(sorted(given)), st.sampled_from(STAGES)))
    room, failures = Room(given, lost), Failures()
    begun = count - list(lost.values()).count("advertise")
    left = count - len(lost)
    if begun < threshold(count) or left < threshold(begun):
        with pytest.raises(FederationError, match="nothing was revealed"):
            add_up(room, failures)
        return
    found = add_up(room, failures)
    entered = [key for key in given if lost.get(key) in (None, "confirm", "unmask")]
    assert list(found.replies) == entered
    # Where large numbers cancel, a sum in floating point is itself off by more than ours.
    plain = np.array([math.fsum(column) for column in zip(*(given[key] for key in entered), strict=True)])
    np.testing.assert_allclose(found.total, plain, rtol=1e-15 * count, atol=error_bound(count))
    assert failures.as_dict() == {key: {"no answer": 1} for key in lost}


@pytest.mark.parametrize(
    ("stage", "did"),
    [
        ("advertise", "advertised keys"),
        ("share", "shared keys"),
        ("mask", "sent a vector"),
        ("confirm", "confirmed"),
        ("unmask", "took off their"),
    ],
)
def test_too_few_are_left(stage: SumStage, did: str) -> None:
    room = Room(vectors(5), {"site-0": stage, "site-1": stage, "site-2": stage})
    with pytest.raises(
        FederationError, match=rf"round 0: 2 clients .*{did}.*at least 4 are needed; nothing was revealed"
    ):
        add_up(room)


def test_a_sum_among_neighbours() -> None:
    """Of more than 30 members, one of whom drops out in each stage."""
    given = vectors(36)
    room, failures = Room(given, {f"site-{7 * i}": stage for i, stage in enumerate(STAGES)}), Failures()
    found = add_up(room, failures)
    entered = [key for key in given if key not in ("site-0", "site-7", "site-14")]
    assert list(found.replies) == entered
    np.testing.assert_allclose(found.total, sum(given[key] for key in entered), atol=error_bound(36))
    assert set(failures.as_dict()) == set(room.lost)
    for stage, _, reply in room.received:
        if stage == "share":
            assert len(read(reply, EncryptedShares).members) == 2 * reach(35) < 34


def test_too_few_neighbours_are_left() -> None:
    """Enough in all, but five in a row on the ring are gone, of whom three may be."""

    class Chosen(Room):
        def reply(self, stage: SumStage, key: str, message: RecordDict) -> RecordDict:
            secrets = self.secrets.get(key)
            if stage == "mask" and secrets is not None and key in secrets.graph.ring[:5]:
                raise InputError("drops out")
            return super().reply(stage, key, message)

    with pytest.raises(
        FederationError, match="31 clients are left in the secure sum, and among some that are neighbours"
    ):
        add_up(Chosen(vectors(36)))


def test_a_sum_of_one_is_none() -> None:
    with pytest.raises(FederationError, match="1 clients take part in the secure sum, and at least 2 are needed"):
        add_up(Room(vectors(1)))


def masked(room: Room) -> dict[str, np.ndarray]:
    return {
        key: read_reply(a).arrays["masked"].numpy().view(np.uint64)
        for stage, key, a in room.received
        if stage == "mask"
    }


def test_masked_vectors_are_noise_to_the_server() -> None:
    length = 4096
    given = dict.fromkeys(("a", "b", "c"), np.linspace(-1, 1, length))
    room, again = Room(given), Room(given)
    add_up(room), add_up(again)
    seen = [*masked(room).values(), *masked(again).values()]
    for number, vector in enumerate(seen):
        assert abs(np.corrcoef(given["a"], vector.astype(np.float64))[0, 1]) < 0.1
        for bit in (0, 20, 43, 63):  # every bit is a coin; 5 standard deviations
            assert abs(np.mean((vector >> np.uint64(bit)) & np.uint64(1)) - 0.5) < 5 * 0.5 / length**0.5
        for other in seen[:number]:
            assert np.mean(other == vector) == 0  # equal inputs, other masks
    difference = masked(room)["a"] - masked(room)["b"]
    assert np.mean(difference == 0) == 0


class Withholding(Room):
    """The server holds back the masked vector of site-1, and tells the others that it dropped out."""

    def __call__(self, stage: SumStage, messages: Mapping[str, RecordDict], /) -> Mapping[str, RecordDict | str]:
        replies = super().__call__(stage, messages)
        return {key: reply for key, reply in replies.items() if (stage, key) != ("mask", "site-1")}


def test_a_client_that_is_said_to_be_lost_stays_covered() -> None:
    """Its mask key is revealed, but not the seed of its own mask."""
    room = Withholding(vectors(4))
    assert "site-1" not in add_up(room).replies
    secrets = room.secrets["site-1"]
    assert secrets is not None
    uncovered = masked(room)["site-1"]
    for other in ("site-0", "site-2", "site-3"):
        common = agree(mask_key(secrets.mask_secret), secrets.mask_keys[secrets.members.index(other)])
        uncovered = uncovered - pair_mask(common, adds=other != "site-0", sum_id=secrets.sum_id, length=6)
    plain = encode(room.vectors["site-1"], 4)
    assert not np.any(uncovered == plain)
    np.testing.assert_array_equal(uncovered, plain + expand(secrets.seed, secrets.sum_id, 6))
    for stage, _, reply in room.received:
        if stage == "unmask":
            found = read(reply, UnmaskShares)
            assert (len(found.seeds), len(found.keys)) == (3, 1)  # of the survivors, and of the lost


# --- members that lie --------------------------------------------------------------------------------------


class Lying(Room):
    """site-0 changes what it says in one stage."""

    def __init__(self, stage: SumStage, change: Any, lost: Any = None) -> None:
        super().__init__(vectors(5), lost)
        self.stage, self.change = stage, change

    def reply(self, stage: SumStage, key: str, message: RecordDict) -> RecordDict:
        reply = super().reply(stage, key, message)
        return self.change(reply) if (stage, key) == (self.stage, "site-0") else reply


def fewer_shares(record: RecordDict) -> RecordDict:
    found = read(record, EncryptedShares)
    return to_record(found.model_copy(update={"members": found.members[:1], "shares": found.shares[:1]}))


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("advertise", lambda record: to_record(PublicKeys(encryption=b"none", mask=b"none"))),
        ("advertise", lambda record: RecordDict()),
        ("share", fewer_shares),
        ("mask", lambda record: RecordDict()),
        ("confirm", lambda record: RecordDict()),
        ("unmask", lambda record: to_record(UnmaskShares(seeds=(), keys=()))),
    ],
)
def test_nonsense_is_set_aside(stage: SumStage, change: Any) -> None:
    room, failures = Lying(stage, change), Failures()
    found = add_up(room, failures)
    assert failures.as_dict() == {"site-0": {"rejected": 1}}
    expected = [key for key in room.vectors if key != "site-0" or stage in ("confirm", "unmask")]
    assert list(found.replies) == expected


def wrong_shares(record: RecordDict) -> RecordDict:
    found = read(record, UnmaskShares)
    seeds, keys = (tuple(s[:-1] + bytes([s[-1] ^ 1]) for s in shares) for shares in (found.seeds, found.keys))
    return to_record(UnmaskShares(seeds=seeds, keys=keys))


@pytest.mark.parametrize("lost", [None, {"site-4": "mask"}])
def test_a_wrong_share_gives_no_wrong_sum(lost: Any) -> None:
    with pytest.raises(FederationError, match="secret do not fit together, so that there is no sum"):
        add_up(Lying("unmask", wrong_shares, lost))
