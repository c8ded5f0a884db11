"""Keys: those of one sum, the one a site signs with, and what two members have in common.

All of it is from the package `cryptography`: X25519, HKDF with SHA-256, AES-256-GCM, and ECDSA with SHA-256. A secret
that is split into shares has 16 bytes, one element of the field that it is split in; HKDF draws keys from it.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedunfold.core.errors import InputError

SECRET_BYTES = 16
NONCE_BYTES = 12
PEM = b"-----BEGIN"
OPENSSH_PRIVATE = b"-----BEGIN OPENSSH"
SIGNED = b"fedunfold secure sum: "
"""What every signed text begins with; nothing that Flower signs with the same key does."""


def digest(*parts: bytes | str) -> bytes:
    """SHA-256 of several parts, each after its length, so that no two lists of parts read alike."""
    found = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "big") + content)
    return found.digest()


def derive(secret: bytes, *purpose: bytes | str) -> bytes:
    """32 bytes for one purpose, by HKDF."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=digest(*purpose)).derive(secret)


def mask_key(secret: bytes) -> X25519PrivateKey:
    """The private key for masks that a secret stands for."""
    return X25519PrivateKey.from_private_bytes(derive(secret, "mask key"))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Its public half."""
    return key.public_key().public_bytes_raw()


def agree(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    """What a private and another's public key have in common; InputError where that is no public key."""
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise InputError("what is sent as a public key is none") from error


def encrypt(common: bytes, text: bytes, *about: str | bytes) -> bytes:
    """A text that only who has the common secret can read, and that says what it is about."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(derive(common, "shares", *about)).encrypt(nonce, text, digest(*about))


def decrypt(common: bytes, encrypted: bytes, *about: str | bytes) -> bytes | None:
    """What was encrypted; None where it was not, or is about something else."""
    nonce, text = encrypted[:NONCE_BYTES], encrypted[NONCE_BYTES:]
    try:
        return AESGCM(derive(common, "shares", *about)).decrypt(nonce, text, digest(*about))
    except (InvalidTag, ValueError):  # a nonce that is too short
        return None


@dataclass(frozen=True)
class Identity:
    """A site among those that it knows.

    Attributes:
        key: What it signs with.
        roster: Everybody's public key, its own too.
    """

    key: ec.EllipticCurvePrivateKey
    roster: Mapping[str, ec.EllipticCurvePublicKey]

    @classmethod
    def of(cls, client_id: str, key: Path, roster: Mapping[str, str]) -> "Identity":
        """The identity of a site.

        Args:
            client_id: Its name.
            key: The file with its private key, as OpenSSH or PEM writes it: the one its SuperNode has.
            roster: Public keys by name, as OpenSSH or PEM writes them.
        """
        known = {name: read_public_key(text, name) for name, text in roster.items()}
        numbers = [found.public_numbers() for found in known.values()]
        if len(set(numbers)) < len(numbers):
            raise InputError("the roster has one key under two names; give every site its own.")
        private = read_private_key(key)
        if client_id not in known or known[client_id].public_numbers() != private.public_key().public_numbers():
            raise InputError(
                f"the roster does not have the key in {key} as that of '{client_id}'; correct one of them."
            )
        return cls(private, known)

    def sign(self, *statement: bytes | str) -> bytes:
        """Its signature under a statement."""
        return self.key.sign(SIGNED + digest(*statement), ec.ECDSA(hashes.SHA256()))

    def has_signed(self, client_id: str, signature: bytes, *statement: bytes | str) -> bool:
        """Whether a site has signed a statement."""
        if client_id not in self.roster:
            return False
        try:
            self.roster[client_id].verify(signature, SIGNED + digest(*statement), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


def read_public_key(text: str, name: str) -> ec.EllipticCurvePublicKey:
    """A site's public key, as OpenSSH or PEM writes it."""
    content = text.strip().encode()
    try:
        found = load_pem_public_key(content) if content.startswith(PEM) else load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"the roster's key of '{name}' cannot be read; give it as in the site's .pub file.") from error
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise InputError(f"the roster's key of '{name}' is no elliptic-curve key; make one with ssh-keygen -t ecdsa.")
    return found


def read_private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key, as OpenSSH or PEM writes it."""
    try:
        content = file.expanduser().read_bytes()
        load = load_ssh_private_key if content.startswith(OPENSSH_PRIVATE) else load_pem_private_key
        found = load(content, password=None)
    except OSError as error:
        raise InputError(f"cannot read the key {file}: {error.strerror}.") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise InputError(f"{file} is no private key without a password; give the SuperNode's own.") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise InputError(f"{file} is no elliptic-curve key; make one with ssh-keygen -t ecdsa.")
    return found
