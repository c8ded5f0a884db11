"""The server's part in a secure sum: it passes messages on, adds up masked vectors, and takes the masks off the sum."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar
from uuid import uuid4

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.schema import Arrays, ClientReply, SumStage, TrainInstruction
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.fixed_point import decode
from fedunfold.engines.flower.secagg.masking import CURVE, expand, from_scalar, shared_mask
from fedunfold.engines.flower.secagg.protocol import read, to_record
from fedunfold.engines.flower.wire import instruction_record, read_reply

Exchange = Callable[[SumStage, Mapping[str, RecordDict]], Mapping[str, RecordDict | str]]
"""Carries a record to each of several clients, and brings back theirs, or why there is none."""
Accepted = TypeVar("Accepted")


@dataclass(frozen=True)
class SumTerm:
    """What one client is to add.

    Attributes:
        message_type: The message it follows.
        array: Which array of its reply it adds.
        instruction: What it is to compute.
        arrays: From what.
        check: Refuses a reply that cannot be used.
        weight: What its array is multiplied with.
    """

    message_type: protocol.SummedMessage
    array: str
    instruction: TrainInstruction
    arrays: Arrays
    check: Callable[[ClientReply], ClientReply]
    weight: float = 1.0


@dataclass(frozen=True)
class SumResult:
    """A secure sum.

    Attributes:
        total: Σ_k v_k, [d] of float64, over the clients in `replies`.
        replies: The numbers that each of them reported beside it.
    """

    total: np.ndarray
    replies: Mapping[str, ClientReply]


@dataclass(frozen=True)
class SumProtocol:
    """One sum of several clients' vectors, in four stages, each of which some of them may not survive.

    A client that drops out before its masked vector has arrived is not in the sum. With fewer than the threshold,
    more than half of those that began, there is no sum.

    Attributes:
        exchange: Carries the messages.
        failures: Where clients that drop out are counted.
        where: Names the sum in errors, such as "round 3".
    """

    exchange: Exchange
    failures: Failures
    where: str

    def run(self, terms: Mapping[str, SumTerm]) -> SumResult:
        """Add up what each client is to add; `FederationError` where too few get through."""
        sum_id, threshold = uuid4().hex, protocol.majority(len(terms))
        self._check_enough(terms, threshold, "take part in")

        def stage(
            name: SumStage, did: str, messages: Mapping[str, RecordDict], accept: Callable[[RecordDict, str], Accepted]
        ) -> dict[str, Accepted]:
            """Replies that can be used, in the order of the messages."""
            replies = self.exchange(name, messages)
            accepted = self.failures.accept_replies(replies, messages, f"{name}, {self.where}", accept)
            self._check_enough(accepted, threshold, did)
            return accepted

        setup = to_record(protocol.SetupRequest(sum_id=sum_id))
        keys = stage("advertise", "advertised keys in", dict.fromkeys(terms, setup), _read_keys)
        broadcast = protocol.KeyBroadcast(
            sum_id=sum_id,
            threshold=threshold,
            members=tuple(keys),
            encryption_keys=tuple(found.encryption for found in keys.values()),
            mask_keys=tuple(found.mask for found in keys.values()),
        )

        def read_encrypted(record: RecordDict, client_id: str) -> protocol.EncryptedShares:
            found = read(record, protocol.EncryptedShares)
            if set(found.members) != set(keys) - {client_id} or len(found.shares) != len(found.members):
                raise InputError("has shares for others than the members")
            return found

        shares = stage("share", "shared keys in", dict.fromkeys(keys, to_record(broadcast)), read_encrypted)
        deliveries = {member: _delivery(sum_id, member, shares, terms[member]) for member in shares}
        replies = stage(
            "mask", "sent a vector to", deliveries, lambda record, member: terms[member].check(read_reply(record))
        )

        def read_revealed(record: RecordDict, client_id: str) -> protocol.UnmaskShares:
            found = read(record, protocol.UnmaskShares)
            if (len(found.seeds), len(found.keys)) != (len(replies), len(shares) - len(replies)):
                raise InputError("reveals shares of others than the members")
            return found

        survivors = to_record(protocol.SurvivorList(sum_id=sum_id, members=tuple(replies)))
        revealed = stage("unmask", "took off their masks in", dict.fromkeys(replies, survivors), read_revealed)
        total = reduce(np.add, [reply.arrays["masked"].numpy().view(np.uint64) for reply in replies.values()])
        self._take_off_masks(total, broadcast, shares, list(revealed.values())[:threshold], sorted(replies))
        return SumResult(decode(total, len(keys)), replies)

    def _check_enough(self, left: Mapping[str, object], threshold: int, did: str) -> None:
        if len(left) < threshold:
            raise FederationError(
                f"{self.where}: {len(left)} clients {did} the secure sum, and at least {threshold} are needed; nothing "
                "was revealed. Let more clients take part, or resume when they are back."
            )

    # --- masks -------------------------------------------------------------------------------------------

    def _take_off_masks(
        self,
        total: np.ndarray,
        broadcast: protocol.KeyBroadcast,
        shares: Mapping[str, protocol.EncryptedShares],
        revealed: Sequence[protocol.UnmaskShares],
        survived: Sequence[str],
    ) -> None:
        """Subtract the masks left in the sum: the survivors' own, and those they have in common with the lost."""
        sum_id, length = broadcast.sum_id, len(total)
        public = dict(zip(broadcast.members, broadcast.mask_keys, strict=True))
        for i, member in enumerate(survived):
            seed = self._combine(member, [found.seeds[i] for found in revealed])
            if hashlib.sha256(seed).digest() != shares[member].commitment:
                raise self._inconsistent(member)
            total -= expand(seed, sum_id, length)
        for i, gone in enumerate(sorted(set(shares) - set(survived))):
            scalar = self._combine(gone, [found.keys[i] for found in revealed])
            try:
                secret = from_scalar(scalar)
            except ValueError as error:
                raise self._inconsistent(gone) from error
            if public_key_to_bytes(secret.public_key()) != public[gone]:
                raise self._inconsistent(gone)
            for member in survived:
                theirs = bytes_to_public_key(public[member])
                total -= shared_mask(secret, theirs, adds=member < gone, sum_id=sum_id, length=length)

    def _combine(self, client_id: str, shares: list[bytes]) -> bytes:
        try:
            return combine_shares(shares)
        except (ValueError, IndexError) as error:
            raise self._inconsistent(client_id) from error

    def _inconsistent(self, client_id: str) -> FederationError:
        return FederationError(
            f"{self.where}: the shares of client '{client_id}'s secret do not fit together, so that there is no sum; "
            "find the client that sends wrong ones, and resume without it."
        )


def _delivery(sum_id: str, client_id: str, shares: Mapping[str, protocol.EncryptedShares], term: SumTerm) -> RecordDict:
    """The shares that the others have encrypted for a client, and what it is to add."""
    senders = tuple(sender for sender in shares if sender != client_id)
    delivery = protocol.ShareDelivery(
        sum_id=sum_id,
        members=senders,
        shares=tuple(shares[sender].shares[shares[sender].members.index(client_id)] for sender in senders),
        message_type=term.message_type,
        array=term.array,
        weight=term.weight,
    )
    record = instruction_record(term.instruction, term.arrays)
    record[protocol.RECORD] = protocol.to_config(delivery)
    return record


def _read_keys(record: RecordDict, client_id: str) -> protocol.PublicKeys:
    found = read(record, protocol.PublicKeys)
    try:
        curves = {bytes_to_public_key(key).curve.name for key in (found.encryption, found.mask)}
    except (ValueError, AttributeError, UnsupportedAlgorithm) as error:
        raise InputError("advertises what is no public key") from error
    if curves != {CURVE.name}:
        raise InputError(f"advertises a public key on another curve than {CURVE.name}")
    return found
