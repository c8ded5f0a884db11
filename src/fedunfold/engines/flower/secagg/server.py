"""The server's part in a secure sum: it passes letters on, adds up masked vectors, and takes the masks off the sum."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar
from uuid import uuid4

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.faults import Faults
from fedunfold.engines.flower.schema import Arrays, ClientReply, SumStage, TrainInstruction
from fedunfold.engines.flower.secagg.fixed_point import decode
from fedunfold.engines.flower.secagg.masking import CURVE, expand, from_scalar, shared_mask
from fedunfold.engines.flower.secagg.protocol import (
    RECORD,
    KeyBroadcast,
    PublicKeys,
    SealedShares,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    UnmaskShares,
    majority,
    read,
    to_config,
    to_record,
)
from fedunfold.engines.flower.wire import assignment_record, read_reply

Records = Mapping[str, RecordDict]
Answer = TypeVar("Answer")


class Exchange(Protocol):
    """Carries a record to each of several clients, by key, and brings back theirs, or why there is none."""

    def __call__(self, verb: SumStage, messages: Records, /) -> Mapping[str, RecordDict | str]: ...


@dataclass(frozen=True)
class SumTerm:
    """What one client is to add: `weight` times the `array` of what it answers to a verb. `check` reads its reply."""

    verb: Literal["train", "backprop", "outer"]
    array: str
    assignment: TrainInstruction
    arrays: Arrays
    check: Callable[[ClientReply], ClientReply]
    weight: float = 1.0


@dataclass(frozen=True)
class Summed:
    """Σ_k v_k, [d] of float64, over the clients in `replies`, with the numbers that each of them said beside it."""

    total: np.ndarray
    replies: Mapping[str, ClientReply]


@dataclass(frozen=True)
class SecureSum:
    """One sum of several clients' vectors, in four stages, each of which some of them may not survive.

    A client that is lost before its masked vector has arrived is not in the sum; `faults` counts it. Fewer than the
    threshold, more than half of those asked, and there is no sum. `where` says in errors which one it was.
    """

    exchange: Exchange
    faults: Faults
    where: str

    def of(self, parts: Mapping[str, SumTerm]) -> Summed:
        sum_id, threshold = uuid4().hex, majority(len(parts))
        self._enough(parts, threshold, "take part in")
        keys = self._stage("advertise", dict.fromkeys(parts, to_record(SetupRequest(sum=sum_id))), _read_keys)
        self._enough(keys, threshold, "went on to advertise keys in")
        roster = KeyBroadcast(
            sum=sum_id,
            threshold=threshold,
            members=tuple(keys),
            seal_keys=tuple(found.seal for found in keys.values()),
            mask_keys=tuple(found.mask for found in keys.values()),
        )

        def read_shares(record: RecordDict, key: str) -> SealedShares:
            found = read(record, SealedShares)
            if set(found.members) != set(keys) - {key} or len(found.shares) != len(found.members):
                raise InputError("has shares for others than the members")
            return found

        shares = self._stage("share", dict.fromkeys(keys, to_record(roster)), read_shares)
        self._enough(shares, threshold, "went on to share keys in")
        orders = {key: _order(sum_id, key, shares, parts[key]) for key in shares}
        replies = self._stage("mask", orders, lambda record, key: parts[key].check(read_reply(record)))
        self._enough(replies, threshold, "sent a vector to")
        revealed = self._revealed(sum_id, replies, len(shares) - len(replies))
        self._enough(revealed, threshold, "took off their masks in")
        masks = self._masks(roster, shares, replies, dict(list(revealed.items())[:threshold]))
        total = sum((reply.arrays["masked"].numpy().view(np.uint64) for reply in replies.values()), np.uint64(0))
        return Summed(decode(total - masks, len(keys)), replies)

    # --- stages ------------------------------------------------------------------------------------------

    def _stage(
        self, verb: SumStage, messages: Records, reading: Callable[[RecordDict, str], Answer]
    ) -> dict[str, Answer]:
        """Those who gave an answer that can be read, in the order they were asked in."""
        return self.faults.sifted(self.exchange(verb, messages), messages, f"{verb}, {self.where}", reading)

    def _revealed(self, sum_id: str, survivors: Mapping[str, ClientReply], lost: int) -> dict[str, UnmaskShares]:
        def read_revealed(record: RecordDict, key: str) -> UnmaskShares:
            found = read(record, UnmaskShares)
            if (len(found.seeds), len(found.keys)) != (len(survivors), lost):
                raise InputError("reveals shares of others than the members")
            return found

        question = to_record(SurvivorList(sum=sum_id, members=tuple(survivors)))
        return self._stage("unmask", dict.fromkeys(survivors, question), read_revealed)

    def _enough(self, left: Mapping[str, object], threshold: int, did: str) -> None:
        if len(left) < threshold:
            raise InputError(
                f"{self.where}: {len(left)} clients {did} the secure sum, and at least {threshold} are needed; nothing "
                "was revealed. Let more clients take part, or go on when they are back."
            )

    # --- masks -------------------------------------------------------------------------------------------

    def _masks(
        self,
        roster: KeyBroadcast,
        shares: Mapping[str, SealedShares],
        survivors: Mapping[str, ClientReply],
        revealed: Mapping[str, UnmaskShares],
    ) -> np.ndarray:
        """What is left of masks in the sum: the survivors' own, and what they have in common with the lost."""
        there, lost = sorted(survivors), sorted(set(shares) - set(survivors))
        length = next(iter(survivors.values())).arrays["masked"].numel()
        public = dict(zip(roster.members, roster.mask_keys, strict=True))
        total = np.zeros(length, dtype=np.uint64)
        for i, key in enumerate(there):
            seed = self._combined(key, [one.seeds[i] for one in revealed.values()])
            if hashlib.sha256(seed).digest() != shares[key].commitment:
                raise self._unfitting(key)
            total += expand(seed, roster.sum, length)
        for i, gone in enumerate(lost):
            try:
                secret = from_scalar(self._combined(gone, [one.keys[i] for one in revealed.values()]))
            except ValueError as error:
                raise self._unfitting(gone) from error
            if public_key_to_bytes(secret.public_key()) != public[gone]:
                raise self._unfitting(gone)
            for key in there:
                theirs = bytes_to_public_key(public[key])
                total += shared_mask(secret, theirs, adds=key < gone, sum_id=roster.sum, length=length)
        return total

    def _combined(self, key: str, shares: Sequence[bytes]) -> bytes:
        try:
            return combine_shares(list(shares))
        except (ValueError, IndexError) as error:
            raise self._unfitting(key) from error

    def _unfitting(self, key: str) -> InputError:
        return InputError(f"{self.where}: the shares of client '{key}'s secret do not fit together; there is no sum.")


def _order(sum_id: str, key: str, shares: Mapping[str, SealedShares], part: SumTerm) -> RecordDict:
    """The shares that the others have sealed for a client, and what it is to add."""
    embed_checksum = {
        sender: dict(zip(found.members, found.shares, strict=True))[key]
        for sender, found in shares.items()
        if sender != key
    }
    delivery = ShareDelivery(
        sum=sum_id,
        members=tuple(embed_checksum),
        shares=tuple(embed_checksum.values()),
        verb=part.verb,
        array=part.array,
        weight=part.weight,
    )
    record = assignment_record(part.assignment, part.arrays)
    record[RECORD] = to_config(delivery)
    return record


def _read_keys(record: RecordDict, key: str) -> PublicKeys:
    found = read(record, PublicKeys)
    try:
        curves = {bytes_to_public_key(one).curve.name for one in (found.seal, found.mask)}
    except (ValueError, AttributeError, UnsupportedAlgorithm) as error:
        raise InputError("advertises what is no public key") from error
    if curves != {CURVE.name}:
        raise InputError(f"advertises a public key on another curve than {CURVE.name}")
    return found
