"""Masks: uniform numbers modulo 2⁶⁴ that are drawn from a secret, and vanish from the sum; and shares of secrets.

A client adds its own mask, and for every neighbour one that both draw from the secret they have in common: the one with
the smaller id adds it, the other subtracts it.
"""

from collections.abc import Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.keys import SECRET_BYTES, derive


def expand(secret: bytes, sum_id: str, length: int) -> np.ndarray:
    """[length] of uint64: the key stream of AES-256 in counter mode, under a key that serves this one sum."""
    key = derive(secret, "mask", sum_id)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def pair_mask(common: bytes, *, adds: bool, sum_id: str, length: int) -> np.ndarray:
    """What a client puts on its vector for a neighbour: the mask of what they have in common, or its negative."""
    mask = expand(common, sum_id, length)
    return mask if adds else np.negative(mask)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, of which so many give it and fewer say nothing (Shamir)."""
    return [share for _, share in Shamir.split(threshold, count, secret, False)]


def combine(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """The secret from as many shares as are needed, each with its place from 0."""
    if any(len(share) != SECRET_BYTES for _, share in shares):
        raise InputError("what is sent as a share is none")
    secret: bytes = Shamir.combine([(place + 1, share) for place, share in shares], False)
    return secret
