"""A client's part in a secure sum.

It decides for itself what it reveals: it takes part in every stage once and in order, reveals to nobody both of another
client's secrets, and nothing at all where fewer than the threshold are left. What it must remember between the stages
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
from flwr.supercore.primitives.asymmetric import bytes_to_private_key as private_key
from flwr.supercore.primitives.asymmetric import bytes_to_public_key as public_key
from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes, public_key_to_bytes

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Settings
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.fixed_point import encode
from fedunfold.engines.flower.secagg.masking import expand, shared_mask, to_scalar

SEED_BYTES = 32


class Secrets(Settings):
    """What a client remembers between the stages of one sum.

    Attributes:
        sum_id: The sum.
        stage: The last stage it has done.
        encryption_key: Its private key for shares that are sent to it.
        mask_key: Its private key for the masks it has in common with others.
        threshold: How many members are needed to reveal anything.
        members: Ids of all members.
        encryption_keys: The members' public keys.
        mask_keys: The members' public keys.
        seed: Of its own mask.
        own_seed_share: Its own share of that.
        senders: The members whose shares it holds.
        seed_shares: Shares of the senders' seeds.
        key_shares: Shares of the senders' mask keys.
    """

    sum_id: str
    stage: Literal["advertised", "shared", "masked"]
    encryption_key: bytes
    mask_key: bytes
    threshold: int = 0
    members: tuple[str, ...] = ()
    encryption_keys: tuple[bytes, ...] = ()
    mask_keys: tuple[bytes, ...] = ()
    seed: bytes = b""
    own_seed_share: bytes = b""
    senders: tuple[str, ...] = ()
    seed_shares: tuple[bytes, ...] = ()
    key_shares: tuple[bytes, ...] = ()

    def then(self, **changes: object) -> "Secrets":
        """The same after another stage."""
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class SecAggClient:
    """A member of secure sums.

    Attributes:
        client_id: Its name in the federation.
    """

    client_id: str

    def advertise(self, setup: protocol.SetupRequest) -> tuple[Secrets, protocol.PublicKeys]:
        """Make two pairs of keys for this sum alone."""
        (encryption, public_encryption), (mask, public_mask) = generate_key_pairs(), generate_key_pairs()
        secrets = Secrets(
            sum_id=setup.sum_id,
            stage="advertised",
            encryption_key=private_key_to_bytes(encryption),
            mask_key=private_key_to_bytes(mask),
        )
        keys = public_key_to_bytes(public_encryption), public_key_to_bytes(public_mask)
        return secrets, protocol.PublicKeys(encryption=keys[0], mask=keys[1])

    def share(
        self, secrets: Secrets | None, broadcast: protocol.KeyBroadcast
    ) -> tuple[Secrets, protocol.EncryptedShares]:
        """Split a fresh seed and the mask key into shares, one pair for each member, encrypted for it."""
        secrets = self._at("advertised", secrets, broadcast.sum_id)
        self._check(secrets, broadcast)
        members, threshold, seed = broadcast.members, broadcast.threshold, randomness.token_bytes(SEED_BYTES)
        seed_shares = create_shares(seed, threshold, len(members))
        key_shares = create_shares(to_scalar(private_key(secrets.mask_key)), threshold, len(members))
        mine, encrypted = private_key(secrets.encryption_key), {}
        for member, theirs, *pair in zip(members, broadcast.encryption_keys, seed_shares, key_shares, strict=True):
            if member != self.client_id:
                common = generate_shared_key(mine, public_key(theirs))
                encrypted[member] = encrypt(common, _pack(broadcast.sum_id, self.client_id, member, *pair))
        own_share = seed_shares[members.index(self.client_id)]
        secrets = secrets.then(stage="shared", **broadcast.model_dump(), seed=seed, own_seed_share=own_share)
        commitment, shares = hashlib.sha256(seed).digest(), tuple(encrypted.values())
        return secrets, protocol.EncryptedShares(commitment=commitment, members=tuple(encrypted), shares=shares)

    def mask(
        self, secrets: Secrets | None, delivery: protocol.ShareDelivery, vector: np.ndarray
    ) -> tuple[Secrets, np.ndarray]:
        """The vector as integers, under its own mask and one for every other member that has shared its secrets."""
        secrets, members = self._at("shared", secrets, delivery.sum_id), delivery.members
        if len(delivery.shares) != len(members):
            raise self._refusal("is not sent one pair of shares from each of the others.")
        if len(set(members)) < len(members) or len(members) + 1 < secrets.threshold:
            least = secrets.threshold - 1
            raise self._refusal(f"adds its vector to those of at least {least} others, not of {len(members)}.")
        sum_id, length = secrets.sum_id, len(vector)
        masked = encode(vector, len(secrets.members)) + expand(secrets.seed, sum_id, length)
        mask_key, encryption_key = private_key(secrets.mask_key), private_key(secrets.encryption_key)
        pairs = []
        for member, encrypted in zip(members, delivery.shares, strict=True):
            if member == self.client_id or member not in secrets.members:
                raise self._refusal(f"gets shares from '{member}', who is no other member of the sum.")
            position = secrets.members.index(member)
            common = generate_shared_key(encryption_key, public_key(secrets.encryption_keys[position]))
            pairs.append(self._decrypt(common, sum_id, member, encrypted))
            theirs, adds = public_key(secrets.mask_keys[position]), self.client_id < member
            masked += shared_mask(mask_key, theirs, adds=adds, sum_id=sum_id, length=length)
        seed_shares, key_shares = zip(*pairs, strict=True)
        return secrets.then(stage="masked", senders=members, seed_shares=seed_shares, key_shares=key_shares), masked

    def unmask(self, secrets: Secrets | None, survivors: protocol.SurvivorList) -> protocol.UnmaskShares:
        """One share for every member: of its own mask's seed where it survived, of its mask key where it dropped out.

        The caller deletes the secrets with this, so that there is no second reply.
        """
        secrets = self._at("masked", secrets, survivors.sum_id)
        survived, least = set(survivors.members), secrets.threshold
        seeds = dict(zip(secrets.senders, secrets.seed_shares, strict=True)) | {self.client_id: secrets.own_seed_share}
        keys = dict(zip(secrets.senders, secrets.key_shares, strict=True))
        if not (self.client_id in survived and survived <= set(seeds)):
            raise self._refusal("gets survivors that are not those it added its vector to.")
        if len(survived) < least:
            raise self._refusal(f"reveals nothing: {len(survived)} members are left, and at least {least} are needed.")
        return protocol.UnmaskShares(
            seeds=tuple(seeds[member] for member in sorted(survived)),
            keys=tuple(keys[member] for member in sorted(set(seeds) - survived)),
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

    def _check(self, secrets: Secrets, broadcast: protocol.KeyBroadcast) -> None:
        members, keys = broadcast.members, (broadcast.encryption_keys, broadcast.mask_keys)
        count, least = len(members), protocol.majority(len(members))
        if any(len(some) != count for some in keys):
            raise self._refusal(f"gets {count} members of a sum and not a pair of keys for each.")
        if any(len(set(some)) != count for some in (members, *keys)):
            raise self._refusal("gets members of a sum with the same name or key.")
        private = secrets.encryption_key, secrets.mask_key
        own = tuple(public_key_to_bytes(private_key(key).public_key()) for key in private)
        if dict(zip(members, zip(*keys, strict=True), strict=True)).get(self.client_id) != own:
            raise self._refusal("is not in the sum with its own keys.")
        if not least <= broadcast.threshold <= count:
            raise self._refusal(
                f"takes part in a sum of {count} where {least} to {count} of them are needed to reveal it, not "
                f"{broadcast.threshold}."
            )

    def _decrypt(self, common: bytes, sum_id: str, sender: str, encrypted: bytes) -> tuple[bytes, bytes]:
        """The two shares in what a member has encrypted for this one in this sum."""
        head = _pack(sum_id, sender, self.client_id, b"", b"")[:-4]
        try:
            decrypted = decrypt(common, encrypted)
        except InvalidToken as error:
            raise self._refusal(f"cannot decrypt the shares that come as client '{sender}'s.") from error
        if not decrypted.startswith(head):
            raise self._refusal(f"gets shares of another sum or client as client '{sender}'s.")
        size = int.from_bytes(decrypted[len(head) : len(head) + 4], "big")
        shares = decrypted[len(head) + 4 :]
        return shares[:size], shares[size:]


def _pack(sum_id: str, sender: str, recipient: str, seed_share: bytes, key_share: bytes) -> bytes:
    """Two shares, with whom and what they are for; no client or sum id has a zero byte in it."""
    head = "\0".join((sum_id, sender, recipient, "")).encode()
    return head + len(seed_share).to_bytes(4, "big") + seed_share + key_share
