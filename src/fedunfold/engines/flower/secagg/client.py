"""A client's part in a secure sum.

It decides for itself what it tells: it takes part in every stage once and in order, tells nobody both of another
client's secrets, and reveals nothing where fewer than the threshold are left. What it must remember between the stages
is in `Secrets`; if that is lost, as when it restarts, it is out of this sum, and nothing else happens.
"""

import hashlib
import secrets as randomness
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cryptography.fernet import InvalidToken
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Settings
from fedunfold.engines.flower.secagg.fixed_point import encode
from fedunfold.engines.flower.secagg.masking import expand, shared_mask, to_scalar
from fedunfold.engines.flower.secagg.protocol import (
    KeyBroadcast,
    PublicKeys,
    SealedShares,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    UnmaskShares,
    majority,
)

SEED_BYTES = 32


class Secrets(Settings):
    """Between the stages of one sum: the client's keys, its own mask's seed, and others' shares in the order of
    `senders`."""

    sum: str
    stage: Literal["advertised", "shared", "masked"]
    seal_key: bytes
    mask_key: bytes
    threshold: int = 0
    members: tuple[str, ...] = ()
    seal_keys: tuple[bytes, ...] = ()
    mask_keys: tuple[bytes, ...] = ()
    seed: bytes = b""
    own_seed_share: bytes = b""
    senders: tuple[str, ...] = ()
    seed_shares: tuple[bytes, ...] = ()
    key_shares: tuple[bytes, ...] = ()

    def then(self, **changes: object) -> "Secrets":
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class SecAggClient:
    """A client, by its key in the federation."""

    key: str

    def advertise(self, opening: SetupRequest) -> tuple[Secrets, PublicKeys]:
        """Two pairs of keys, made for this sum alone."""
        seal, mask = generate_key_pairs(), generate_key_pairs()
        kept = Secrets(
            sum=opening.sum,
            stage="advertised",
            seal_key=private_key_to_bytes(seal[0]),
            mask_key=private_key_to_bytes(mask[0]),
        )
        return kept, PublicKeys(seal=public_key_to_bytes(seal[1]), mask=public_key_to_bytes(mask[1]))

    def share(self, secrets: Secrets | None, roster: KeyBroadcast) -> tuple[Secrets, SealedShares]:
        """Shares of a fresh seed and of the mask key, one pair for each member, sealed for it."""
        secrets = self._at("advertised", secrets, roster.sum)
        self._check(secrets, roster)
        count, seed = len(roster.members), randomness.token_bytes(SEED_BYTES)
        seed_shares = create_shares(seed, roster.threshold, count)
        key_shares = create_shares(to_scalar(bytes_to_private_key(secrets.mask_key)), roster.threshold, count)
        mine, embed_checksum = bytes_to_private_key(secrets.seal_key), {}
        for member, theirs, *pair in zip(roster.members, roster.seal_keys, seed_shares, key_shares, strict=True):
            if member != self.key:
                seal = generate_shared_key(mine, bytes_to_public_key(theirs))
                embed_checksum[member] = encrypt(seal, _pack(roster.sum, self.key, member, *pair))
        kept = secrets.then(
            stage="shared",
            threshold=roster.threshold,
            members=roster.members,
            seal_keys=roster.seal_keys,
            mask_keys=roster.mask_keys,
            seed=seed,
            own_seed_share=seed_shares[roster.members.index(self.key)],
        )
        commitment = hashlib.sha256(seed).digest()
        return kept, SealedShares(
            commitment=commitment, members=tuple(embed_checksum), shares=tuple(embed_checksum.values())
        )

    def mask(self, secrets: Secrets | None, delivery: ShareDelivery, vector: np.ndarray) -> tuple[Secrets, np.ndarray]:
        """The vector as integers, under its own mask and one for every other member that has shared its secrets."""
        secrets = self._at("shared", secrets, delivery.sum)
        if len(delivery.shares) != len(delivery.members):
            raise InputError(f"client '{self.key}' is not sent one pair of shares from each of the others.")
        if len(set(delivery.members)) < len(delivery.members) or len(delivery.members) + 1 < secrets.threshold:
            raise InputError(
                f"client '{self.key}' adds its vector to those of at least {secrets.threshold - 1} others, not of "
                f"{len(delivery.members)}."
            )
        masked = encode(vector, len(secrets.members)) + expand(secrets.seed, secrets.sum, len(vector))
        mine, opener = bytes_to_private_key(secrets.mask_key), bytes_to_private_key(secrets.seal_key)
        pairs = []
        for member, embed_checksum in zip(delivery.members, delivery.shares, strict=True):
            if member == self.key or member not in secrets.members:
                raise InputError(f"client '{self.key}' gets shares from '{member}', who is no other member of the sum.")
            number = secrets.members.index(member)
            seal = generate_shared_key(opener, bytes_to_public_key(secrets.seal_keys[number]))
            pairs.append(self._opened(seal, secrets.sum, member, embed_checksum))
            theirs = bytes_to_public_key(secrets.mask_keys[number])
            masked += shared_mask(mine, theirs, adds=self.key < member, sum_id=secrets.sum, length=len(vector))
        kept = secrets.then(
            stage="masked",
            senders=delivery.members,
            seed_shares=tuple(pair[0] for pair in pairs),
            key_shares=tuple(pair[1] for pair in pairs),
        )
        return kept, masked

    def unmask(self, secrets: Secrets | None, survivors: SurvivorList) -> UnmaskShares:
        """One share for every member: of its own mask's seed where it survived, of its mask key where it is lost.

        The caller forgets the secrets with this, so that there is no second answer.
        """
        secrets = self._at("masked", secrets, survivors.sum)
        there = set(survivors.members)
        seeds = dict(zip(secrets.senders, secrets.seed_shares, strict=True)) | {self.key: secrets.own_seed_share}
        keys = dict(zip(secrets.senders, secrets.key_shares, strict=True))
        if not (self.key in there and there <= set(seeds)):
            raise InputError(f"client '{self.key}' is told of survivors that are not those it added its vector to.")
        if len(there) < secrets.threshold:
            raise InputError(
                f"client '{self.key}' reveals nothing: {len(there)} members are left, and at least "
                f"{secrets.threshold} are needed."
            )
        return UnmaskShares(
            seeds=tuple(seeds[member] for member in sorted(there)),
            keys=tuple(keys[member] for member in sorted(set(seeds) - there)),
        )

    # --- checks ------------------------------------------------------------------------------------------

    def _at(self, stage: str, secrets: Secrets | None, sum_id: str) -> Secrets:
        if secrets is None or secrets.sum != sum_id:
            raise InputError(f"client '{self.key}' knows nothing of this sum; it may have restarted.")
        if secrets.stage != stage:
            raise InputError(
                f"client '{self.key}' has {secrets.stage} in this sum; every stage is done once, in order."
            )
        return secrets

    def _check(self, secrets: Secrets, roster: KeyBroadcast) -> None:
        count = len(roster.members)
        if not count == len(roster.seal_keys) == len(roster.mask_keys):
            raise InputError(
                f"client '{self.key}' is told of {count} members of a sum and not of a pair of keys for each."
            )
        if not count == len(set(roster.members)) == len(set(roster.seal_keys)) == len(set(roster.mask_keys)):
            raise InputError(f"client '{self.key}' is told of members of a sum with the same name or key.")
        own = tuple(
            public_key_to_bytes(bytes_to_private_key(key).public_key()) for key in (secrets.seal_key, secrets.mask_key)
        )
        entries = dict(zip(roster.members, zip(roster.seal_keys, roster.mask_keys, strict=True), strict=True))
        if entries.get(self.key) != own:
            raise InputError(f"client '{self.key}' is not in the sum with its own keys.")
        if not majority(count) <= roster.threshold <= count:
            raise InputError(
                f"client '{self.key}' takes part in a sum of {count} where {majority(count)} to {count} of them are "
                f"needed to reveal it, not {roster.threshold}."
            )

    def _opened(self, seal: bytes, sum_id: str, sender: str, embed_checksum: bytes) -> tuple[bytes, bytes]:
        """The two shares in what a member has sealed for this one in this sum."""
        head = _pack(sum_id, sender, self.key, b"", b"")[:-4]
        try:
            opened = decrypt(seal, embed_checksum)
        except InvalidToken as error:
            raise InputError(f"client '{self.key}' cannot open the shares that come as client '{sender}'s.") from error
        if not opened.startswith(head):
            raise InputError(f"client '{self.key}' gets shares of another sum or client as client '{sender}'s.")
        size = int.from_bytes(opened[len(head) : len(head) + 4], "big")
        shares = opened[len(head) + 4 :]
        return shares[:size], shares[size:]


def _pack(sum_id: str, sender: str, recipient: str, seed_share: bytes, key_share: bytes) -> bytes:
    """Two shares, with whom and what they are for; no key or sum id has a zero byte in it."""
    head = "\0".join((sum_id, sender, recipient, "")).encode()
    return head + len(seed_share).to_bytes(4, "big") + seed_share + key_share
