"""The server's part in a secure sum: it passes messages on, adds up masked vectors, and takes the masks off the sum."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar
from uuid import uuid4

import numpy as np
from flwr.app import RecordDict

from fedunfold.core.errors import FederationError, InputError
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.schema import Arrays, ClientReply, SumStage, TrainInstruction
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.fixed_point import decode
from fedunfold.engines.flower.secagg.graph import Graph, two_thirds
from fedunfold.engines.flower.secagg.keys import agree, digest, mask_key, public_bytes
from fedunfold.engines.flower.secagg.masking import combine, expand, pair_mask
from fedunfold.engines.flower.secagg.protocol import read, to_record
from fedunfold.engines.flower.secagg.statements import scale_of
from fedunfold.engines.flower.wire import instruction_record, read_reply

log = logging.getLogger("fedunfold")

Exchange = Callable[[SumStage, Mapping[str, RecordDict]], Mapping[str, RecordDict | str]]
"""Carries a record to each of several clients, and brings back theirs, or why there is none."""
Accepted = TypeVar("Accepted")
KEY_BYTES = 32


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

    @property
    def scale(self) -> float:
        """By how much the client counts."""
        return scale_of(self.instruction, self.arrays, self.array, self.weight)


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
    """One sum of several clients' vectors, in five stages, each of which some of them may not survive.

    A client that drops out before its masked vector has arrived is not in the sum. With fewer than the threshold, more
    than two thirds of those that began, there is no sum.

    Attributes:
        exchange: Carries the messages.
        failures: Where clients that drop out are counted.
        where: Names the sum in errors, such as "round 3".
        recorded: How many sums each client had on record when it last said so.
    """

    exchange: Exchange
    failures: Failures
    where: str
    recorded: dict[str, int] = field(default_factory=dict)

    def run(self, terms: Mapping[str, SumTerm]) -> SumResult:
        """Add up what each client is to add; `FederationError` where too few get through."""
        sum_id, threshold = uuid4().hex, protocol.threshold(len(terms))
        self._check_enough(terms, protocol.MIN_CLIENTS, "take part in")

        def stage(
            name: SumStage, did: str, messages: Mapping[str, RecordDict], accept: Callable[[RecordDict, str], Accepted]
        ) -> dict[str, Accepted]:
            """Replies that can be used, in the order of the messages."""
            replies = self.exchange(name, messages)
            accepted = self.failures.accept_replies(replies, messages, f"{name}, {self.where}", accept)
            self._check_enough(accepted, threshold, did, {k: why for k, why in replies.items() if isinstance(why, str)})
            return accepted

        setup = to_record(protocol.SetupRequest(sum_id=sum_id))
        keys = stage("advertise", "advertised keys in", dict.fromkeys(terms, setup), _read_keys)
        self._warn_of_lost_records(keys)
        broadcast = protocol.KeyBroadcast(
            sum_id=sum_id,
            members=tuple(keys),
            encryption_keys=tuple(found.encryption for found in keys.values()),
            mask_keys=tuple(found.mask for found in keys.values()),
            signatures=tuple(found.signature for found in keys.values()),
        )
        listed = (part for member, found in keys.items() for part in (member, found.encryption, found.mask))
        graph = Graph(broadcast.members, digest("members", sum_id, *listed))
        # Who drops out from here on has to be made up for by those whose keys are in the list.
        threshold = protocol.threshold(len(keys))

        def read_encrypted(record: RecordDict, client_id: str) -> protocol.EncryptedShares:
            found = read(record, protocol.EncryptedShares)
            if found.members != graph.neighbours(client_id) or len(found.shares) != len(found.members):
                raise InputError("has shares for others than its neighbours")
            return found

        shares = stage("share", "shared keys in", dict.fromkeys(keys, to_record(broadcast)), read_encrypted)
        self._check_neighbours(graph, shares)
        deliveries = _deliveries(sum_id, graph, shares, terms)
        replies = stage(
            "mask", "sent a vector to", deliveries, lambda record, member: terms[member].check(read_reply(record))
        )
        self._check_neighbours(graph, replies)
        survivors = to_record(protocol.SurvivorList(sum_id=sum_id, members=tuple(replies)))
        confirmed = stage(
            "confirm", "confirmed", dict.fromkeys(replies, survivors), lambda r, _: read(r, protocol.Confirmation)
        )
        confirmations = protocol.Confirmations(
            sum_id=sum_id,
            members=tuple(confirmed),
            signatures=tuple(found.signature for found in confirmed.values()),
        )

        def read_revealed(record: RecordDict, client_id: str) -> dict[str, bytes]:
            """Its shares, by whose they are."""
            found = read(record, protocol.UnmaskShares)
            held = [member for member in graph.holders(client_id) if member in shares]
            seeds, lost = [m for m in held if m in replies], [m for m in held if m not in replies]
            if (len(found.seeds), len(found.keys)) != (len(seeds), len(lost)):
                raise InputError("reveals shares of others than its neighbours")
            return dict(zip([*seeds, *lost], [*found.seeds, *found.keys], strict=True))

        asked = dict.fromkeys(confirmed, to_record(confirmations))
        revealed = stage("unmask", "took off their masks in", asked, read_revealed)
        total = reduce(np.add, [reply.arrays["masked"].numpy().view(np.uint64) for reply in replies.values()])
        self._take_off_masks(total, graph, keys, shares, revealed, sorted(replies), sum_id)
        return SumResult(decode(total, len(keys)), replies)

    def _check_enough(
        self, left: Mapping[str, object], threshold: int, did: str, refusals: Mapping[str, str] | None = None
    ) -> None:
        if len(left) < threshold:
            why = "".join(f" Client '{key}' failed: {reason}" for key, reason in list((refusals or {}).items())[:1])
            raise FederationError(
                f"{self.where}: {len(left)} clients {did} the secure sum, and at least {threshold} are needed; nothing "
                f"was revealed. Let more clients take part, or resume when they are back.{why}"
            )

    def _check_neighbours(self, graph: Graph, left: Mapping[str, object]) -> None:
        if not graph.holds(left):
            raise FederationError(
                f"{self.where}: {len(left)} clients are left in the secure sum, and among some that are neighbours too "
                "few; nothing was revealed. Resume when more are back."
            )

    def _warn_of_lost_records(self, keys: Mapping[str, protocol.PublicKeys]) -> None:
        for member, found in keys.items():
            if found.recorded < self.recorded.get(member, 0):
                log.warning(
                    "%s: client %s has lost its record of the sums it was in, and would add the same vectors up again; "
                    "begin runs anew.",
                    self.where,
                    member,
                )
            self.recorded[member] = found.recorded

    # --- masks -------------------------------------------------------------------------------------------

    def _take_off_masks(
        self,
        total: np.ndarray,
        graph: Graph,
        keys: Mapping[str, protocol.PublicKeys],
        shares: Mapping[str, protocol.EncryptedShares],
        revealed: Mapping[str, Mapping[str, bytes]],
        survived: list[str],
        sum_id: str,
    ) -> None:
        """Subtract the masks left in the sum: the survivors' own, and those they have in common with the lost."""
        length = len(total)
        for member in survived:
            seed = self._combine(graph, member, revealed)
            if hashlib.sha256(seed).digest() != shares[member].commitment:
                raise self._inconsistent(member)
            total -= expand(seed, sum_id, length)
        for gone in sorted(set(shares) - set(survived)):
            private = mask_key(self._combine(graph, gone, revealed))
            if public_bytes(private) != keys[gone].mask:
                raise self._inconsistent(gone)
            for member in graph.neighbours(gone):
                if member in survived:
                    common = agree(private, keys[member].mask)
                    total -= pair_mask(common, adds=member < gone, sum_id=sum_id, length=length)

    def _combine(self, graph: Graph, client_id: str, revealed: Mapping[str, Mapping[str, bytes]]) -> bytes:
        """A client's secret from the shares of as many of its holders as are needed."""
        holders = graph.holders(client_id)
        found = [(i, revealed[holder][client_id]) for i, holder in enumerate(holders) if holder in revealed]
        least = two_thirds(len(holders))
        if len(found) < least:
            raise FederationError(
                f"{self.where}: {len(found)} neighbours of client '{client_id}' took off their masks, and at least "
                f"{least} are needed, so that there is no sum; resume when more are back."
            )
        try:
            return combine(found[:least])
        except InputError as error:
            raise self._inconsistent(client_id) from error

    def _inconsistent(self, client_id: str) -> FederationError:
        return FederationError(
            f"{self.where}: the shares of client '{client_id}'s secret do not fit together, so that there is no sum; "
            "find the client that sends wrong ones, and resume without it."
        )


def _deliveries(
    sum_id: str, graph: Graph, shares: Mapping[str, protocol.EncryptedShares], terms: Mapping[str, SumTerm]
) -> dict[str, RecordDict]:
    """For every client the shares that its neighbours have encrypted for it, and what everybody is to add."""
    members = tuple(shares)
    encrypted = {member: dict(zip(found.members, found.shares, strict=True)) for member, found in shares.items()}
    kinds = tuple(f"{terms[member].message_type}:{terms[member].array}" for member in members)
    scales = tuple(terms[member].scale for member in members)
    found = {}
    for member in members:
        term, senders = terms[member], tuple(other for other in graph.neighbours(member) if other in shares)
        delivery = protocol.ShareDelivery(
            sum_id=sum_id,
            members=members,
            terms=kinds,
            scales=scales,
            senders=senders,
            shares=tuple(encrypted[sender][member] for sender in senders),
            message_type=term.message_type,
            array=term.array,
            weight=term.weight,
        )
        found[member] = instruction_record(term.instruction, term.arrays)
        found[member][protocol.RECORD] = protocol.to_config(delivery)
    return found


def _read_keys(record: RecordDict, client_id: str) -> protocol.PublicKeys:
    found = read(record, protocol.PublicKeys)
    if any(len(key) != KEY_BYTES for key in (found.encryption, found.mask)):
        raise InputError("advertises what is no public key")
    return found
