"""Masks: uniform numbers modulo 2⁶⁴ that are drawn from a secret, and vanish from the sum.

A client adds its own mask, and for every other client one that both draw from the secret they share: the one with the
smaller id adds it, the other subtracts it.
"""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

CURVE = ec.SECP384R1()  # of Flower's keys; a private one is a number of 48 bytes
SCALAR_BYTES = 48


def expand(secret: bytes, sum_id: str, length: int) -> np.ndarray:
    """[length] of uint64: the key stream of AES-256 in counter mode, under a key that serves this one sum."""
    key = hashlib.sha256(b"fedunfold mask\0" + sum_id.encode() + b"\0" + secret).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def shared_mask(
    mine: ec.EllipticCurvePrivateKey, theirs: ec.EllipticCurvePublicKey, *, adds: bool, sum_id: str, length: int
) -> np.ndarray:
    """What a client puts on its vector for one other client: the mask of the two, or its negative."""
    mask = expand(generate_shared_key(mine, theirs), sum_id, length)
    return mask if adds else np.negative(mask)


def to_scalar(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as the number that it is: shorter to share than a file of it."""
    return key.private_numbers().private_value.to_bytes(SCALAR_BYTES, "big")


def from_scalar(scalar: bytes) -> ec.EllipticCurvePrivateKey:
    """The private key of that number."""
    return ec.derive_private_key(int.from_bytes(scalar, "big"), CURVE)
