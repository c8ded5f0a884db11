"""A client's part in a secure sum.

It decides for itself what it reveals, whatever the server says: it takes part in every stage once and in order, with
members whose keys the sites themselves have signed, and reveals its shares once more than two thirds of the members
have signed the same list of survivors as it has: to nobody both of another client's secrets. What it must remember
between the stages is in `Secrets`; if that is lost, as when it restarts, it is out of this sum, and nothing else
happens.
"""

import hashlib
import math
import secrets as randomness
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Settings
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.fixed_point import encode
from fedunfold.engines.flower.secagg.graph import Graph, two_thirds
from fedunfold.engines.flower.secagg.keys import (
    SECRET_BYTES,
    Identity,
    agree,
    decrypt,
    digest,
    encrypt,
    mask_key,
    public_bytes,
)
from fedunfold.engines.flower.secagg.masking import expand, pair_mask, split
from fedunfold.engines.flower.secagg.policy import SitePolicy, chosen

ROUNDING = 1e-6
"""How far the scale that the server names may lie from what a client finds, whose processor rounds otherwise."""


class Secrets(Settings):
    """What a client remembers between the stages of one sum.

    Attributes:
        sum_id: The sum.
        stage: The last stage it has done.
        encryption_key: Its private key for shares that are sent to it.
        mask_secret: What its private key for masks is drawn from.
        members: Ids of all members.
        encryption_keys: The members' public keys.
        mask_keys: The members' public keys.
        keys: The digest of the list of all these.
        seed: Of its own mask.
        own_seed_share: Its own share of that.
        delivered: The members that have shared their secrets.
        terms: What each of them adds.
        scales: By how much each of them counts.
        content: The digest of what is added up.
        claims: Under which names its vector is on record.
        senders: Its neighbours among the members that have shared theirs.
        seed_shares: Shares of the senders' seeds.
        key_shares: Shares of the senders' mask keys.
        survivors: The list it has confirmed.
    """

    sum_id: str
    stage: Literal["advertised", "shared", "masked", "confirmed"]
    encryption_key: bytes
    mask_secret: bytes
    members: tuple[str, ...] = ()
    encryption_keys: tuple[bytes, ...] = ()
    mask_keys: tuple[bytes, ...] = ()
    keys: bytes = b""
    seed: bytes = b""
    own_seed_share: bytes = b""
    delivered: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    content: bytes = b""
    claims: tuple[str, ...] = ()
    senders: tuple[str, ...] = ()
    seed_shares: tuple[bytes, ...] = ()
    key_shares: tuple[bytes, ...] = ()
    survivors: tuple[str, ...] = ()

    @property
    def graph(self) -> Graph:
        """Who is whose neighbour."""
        return Graph(self.members, self.keys)

    def then(self, **changes: object) -> "Secrets":
        """The same after another stage."""
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class SecAggClient:
    """A member of secure sums.

    Attributes:
        client_id: Its name in the federation.
        identity: Its key and the roster; without one nothing is signed, and the server has to follow the protocol.
        policy: What it takes part in.
    """

    client_id: str
    identity: Identity | None = None
    policy: SitePolicy = field(default_factory=SitePolicy)

    def advertise(self, setup: protocol.SetupRequest, recorded: int = 0) -> tuple[Secrets, protocol.PublicKeys]:
        """Make two pairs of keys for this sum alone, and sign them."""
        encryption, secret = X25519PrivateKey.generate(), randomness.token_bytes(SECRET_BYTES)
        secrets = Secrets(
            sum_id=setup.sum_id, stage="advertised", encryption_key=encryption.private_bytes_raw(), mask_secret=secret
        )
        pair = public_bytes(encryption), public_bytes(mask_key(secret))
        signature = b"" if self.identity is None else self.identity.sign("keys", setup.sum_id, self.client_id, *pair)
        return secrets, protocol.PublicKeys(encryption=pair[0], mask=pair[1], signature=signature, recorded=recorded)

    def share(
        self, secrets: Secrets | None, broadcast: protocol.KeyBroadcast
    ) -> tuple[Secrets, protocol.EncryptedShares]:
        """Split a fresh seed and the mask key into shares, a pair for itself and each neighbour, encrypted for it."""
        secrets = self._at("advertised", secrets, broadcast.sum_id)
        self._check_keys(secrets, broadcast)
        members, seed = broadcast.members, randomness.token_bytes(SECRET_BYTES)
        keys = broadcast.encryption_keys, broadcast.mask_keys
        list_digest = digest(
            "members", broadcast.sum_id, *(part for one in zip(members, *keys, strict=True) for part in one)
        )
        holders = Graph(members, list_digest).holders(self.client_id)
        pairs = [split(secret, two_thirds(len(holders)), len(holders)) for secret in (seed, secrets.mask_secret)]
        mine, own_share, encrypted = X25519PrivateKey.from_private_bytes(secrets.encryption_key), b"", {}
        for holder, seed_share, key_share in zip(holders, *pairs, strict=True):
            if holder == self.client_id:
                own_share = seed_share
                continue
            about = list_digest, self.client_id, holder
            common = self._common(mine, holder, keys[0][members.index(holder)])
            encrypted[holder] = encrypt(common, seed_share + key_share, *about)
        fields = broadcast.model_dump(exclude={"signatures"})
        secrets = secrets.then(stage="shared", **fields, keys=list_digest, seed=seed, own_seed_share=own_share)
        commitment, shares = hashlib.sha256(seed).digest(), tuple(encrypted.values())
        return secrets, protocol.EncryptedShares(commitment=commitment, members=tuple(encrypted), shares=shares)

    def mask(
        self,
        secrets: Secrets | None,
        delivery: protocol.ShareDelivery,
        vector: Callable[[], np.ndarray],
        *,
        scale: float,
        request: bytes,
        record: Callable[[bytes], tuple[str, ...]] = lambda _: (),
    ) -> tuple[Secrets, np.ndarray]:
        """The vector as integers, under its own mask and one for every neighbour that has shared its secrets.

        Args:
            secrets: Of the stages before.
            delivery: What the others have shared, and what everybody adds.
            vector: Computes the vector, once all else is checked.
            scale: By how much this client counts, as it finds from what it was sent.
            request: The digest of what all members have to be sent alike.
            record: Puts the sum on record by the digest of its members and scales, and returns under which names.
        """
        secrets = self._at("shared", secrets, delivery.sum_id)
        self._check_delivery(secrets, delivery, scale)
        pairs = [
            self._decrypt(secrets, sender, encrypted)
            for sender, encrypted in zip(delivery.senders, delivery.shares, strict=True)
        ]
        who = [
            part
            for one in zip(delivery.members, delivery.terms, map(repr, delivery.scales), strict=True)
            for part in one
        ]
        claims, numbers = record(digest("who", *who)), vector()
        sum_id, length, private = secrets.sum_id, len(numbers), mask_key(secrets.mask_secret)
        masked = encode(numbers, len(secrets.members)) + expand(secrets.seed, sum_id, length)
        for sender in delivery.senders:
            common = self._common(private, sender, secrets.mask_keys[secrets.members.index(sender)])
            masked += pair_mask(common, adds=self.client_id < sender, sum_id=sum_id, length=length)
        seed_shares, key_shares = (tuple(pair[i] for pair in pairs) for i in (0, 1))
        secrets = secrets.then(
            stage="masked",
            **delivery.model_dump(include={"terms", "scales", "senders"}),
            delivered=delivery.members,
            content=digest("content", request, *who),
            claims=claims,
            seed_shares=seed_shares,
            key_shares=key_shares,
        )
        return secrets, masked

    def confirm(
        self, secrets: Secrets | None, survivors: protocol.SurvivorList
    ) -> tuple[Secrets, protocol.Confirmation]:
        """Sign who is in the sum, what they were sent and by how much each of them counts."""
        secrets, left = self._at("masked", secrets, survivors.sum_id), tuple(sorted(set(survivors.members)))
        if self.client_id not in left or not set(left) <= set(secrets.delivered):
            raise self._refusal("gets survivors that are not those it added its vector to.")
        self._check_left(secrets, left, "confirms nothing")
        secrets = secrets.then(stage="confirmed", survivors=left)
        signature = b"" if self.identity is None else self.identity.sign(*_statement(secrets))
        return secrets, protocol.Confirmation(signature=signature)

    def unmask(self, secrets: Secrets | None, confirmations: protocol.Confirmations) -> protocol.UnmaskShares:
        """A share for itself and every neighbour: of its own mask's seed where it survived, else of its mask key.

        The caller deletes the secrets with this, so that there is no second reply.
        """
        secrets = self._at("confirmed", secrets, confirmations.sum_id)
        self._check_confirmations(secrets, confirmations)
        seeds = dict(zip(secrets.senders, secrets.seed_shares, strict=True)) | {self.client_id: secrets.own_seed_share}
        keys, survived = dict(zip(secrets.senders, secrets.key_shares, strict=True)), set(secrets.survivors)
        return protocol.UnmaskShares(
            seeds=tuple(seeds[member] for member in sorted(survived & set(seeds))),
            keys=tuple(keys[member] for member in sorted(set(keys) - survived)),
        )

    # --- checks ------------------------------------------------------------------------------------------

    def _refusal(self, reason: str) -> InputError:
        """Why this client does not do what the server wants."""
        return InputError(f"client '{self.client_id}' {reason}")

    def _at(self, stage: str, secrets: Secrets | None, sum_id: str) -> Secrets:
        if secrets is None or secrets.sum_id != sum_id:
            raise self._refusal("knows nothing of this sum; it may have restarted.")
        if secrets.stage != stage:
            raise self._refusal(f"has {secrets.stage} in this sum; every stage is done once, in order.")
        return secrets

    def _check_keys(self, secrets: Secrets, broadcast: protocol.KeyBroadcast) -> None:
        members, keys = broadcast.members, (broadcast.encryption_keys, broadcast.mask_keys)
        count, least = len(members), max(self.policy.min_members, protocol.MIN_CLIENTS)
        if any(len(some) != count for some in (*keys, broadcast.signatures)):
            raise self._refusal(f"gets {count} members of a sum and not a pair of signed keys for each.")
        if any(len(set(some)) != count for some in (members, *keys)):
            raise self._refusal("gets members of a sum with the same name or key.")
        own = X25519PrivateKey.from_private_bytes(secrets.encryption_key), mask_key(secrets.mask_secret)
        pairs = dict(zip(members, zip(*keys, strict=True), strict=True))
        if pairs.get(self.client_id) != tuple(map(public_bytes, own)):
            raise self._refusal("is not in the sum with its own keys.")
        if count < least:
            raise self._refusal(f"takes part in sums of at least {least} clients, not of {count} (min-members).")
        if self.identity is None:
            return
        for member, signature in zip(members, broadcast.signatures, strict=True):
            if member not in self.identity.roster:
                raise self._refusal(f"takes part with no '{member}', who is not in its roster.")
            if not self.identity.has_signed(member, signature, "keys", broadcast.sum_id, member, *pairs[member]):
                raise self._refusal(f"gets keys as client '{member}'s that '{member}' has not signed for this sum.")

    def _check_delivery(self, secrets: Secrets, delivery: protocol.ShareDelivery, scale: float) -> None:
        members = delivery.members
        if len(set(members)) < len(members) or not {self.client_id} <= set(members) <= set(secrets.members):
            raise self._refusal("is not to add its vector to those of other members of the sum.")
        if not len(members) == len(delivery.terms) == len(delivery.scales):
            raise self._refusal("is not told what each of the members adds.")
        neighbours = set(secrets.graph.neighbours(self.client_id))
        if set(delivery.senders) != neighbours & set(members) or len(delivery.shares) != len(set(delivery.senders)):
            raise self._refusal("is not sent one pair of shares from each of its neighbours.")
        at = members.index(self.client_id)
        same = delivery.terms[at] == f"{delivery.message_type}:{delivery.array}"
        if not (same and math.isclose(delivery.scales[at], scale, rel_tol=ROUNDING)):
            raise self._refusal("is to add something else than the members of the sum are told.")
        self._check_left(secrets.then(delivered=members, terms=delivery.terms, scales=delivery.scales), members)

    def _check_left(self, secrets: Secrets, left: tuple[str, ...], does: str = "adds nothing up") -> None:
        """Refuse what too few are left for, or one of those left decides nearly alone."""
        if not secrets.graph.holds(left):
            least = protocol.threshold(len(secrets.members))
            where = "" if secrets.graph.is_complete else ", and two thirds among neighbours"
            raise self._refusal(f"{does}: {len(left)} members are left, and at least {least} are needed{where}.")
        terms, scales = (chosen(secrets.delivered, values, set(left)) for values in (secrets.terms, secrets.scales))
        try:
            self.policy.check_sum(terms, scales)
        except InputError as error:
            raise self._refusal(str(error)) from error

    def _check_confirmations(self, secrets: Secrets, confirmations: protocol.Confirmations) -> None:
        members, least = confirmations.members, protocol.threshold(len(secrets.members))
        if len(members) != len(confirmations.signatures) or not set(members) <= set(secrets.survivors):
            raise self._refusal("gets confirmations of others than the survivors.")
        if len(set(members)) < least:
            raise self._refusal(f"reveals nothing: {len(set(members))} have confirmed, and at least {least} have to.")
        if self.identity is None:
            return
        for member, signature in zip(members, confirmations.signatures, strict=True):
            if not self.identity.has_signed(member, signature, *_statement(secrets)):
                raise self._refusal(
                    f"reveals nothing: '{member}' has not confirmed the sum that it was told of, with the same "
                    "clients, model and weights."
                )

    def _common(self, private: X25519PrivateKey, member: str, public: bytes) -> bytes:
        try:
            return agree(private, public)
        except InputError as error:
            raise self._refusal(f"cannot use the keys that come as client '{member}'s: {error}.") from error

    def _decrypt(self, secrets: Secrets, sender: str, encrypted: bytes) -> tuple[bytes, bytes]:
        """The two shares in what a member has encrypted for this one in this sum."""
        theirs = secrets.encryption_keys[secrets.members.index(sender)]
        common = self._common(X25519PrivateKey.from_private_bytes(secrets.encryption_key), sender, theirs)
        text = decrypt(common, encrypted, secrets.keys, sender, self.client_id)
        if text is None or len(text) != 2 * SECRET_BYTES:
            raise self._refusal(f"cannot decrypt the shares that come as client '{sender}'s.")
        return text[:SECRET_BYTES], text[SECRET_BYTES:]


def _statement(secrets: Secrets) -> tuple[bytes | str, ...]:
    """What members sign once their vectors have been sent."""
    return ("survivors", secrets.sum_id, secrets.keys, secrets.content, *secrets.survivors)
