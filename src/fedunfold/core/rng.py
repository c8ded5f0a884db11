"""All randomness as a pure function of what it is for.

A draw depends on (seed, purpose, run, round, client id, epoch) and on nothing else: not on the order in which clients
are listed or trained, not on the device, not on the engine. `run` names the pass over the federation: ``learn-3`` for
the fourth outer iteration, ``trial-0`` for the first trial.
"""

import hashlib
import threading
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii

import numpy as np


def _digest(seed: int, purpose: str, *parts: str | int) -> bytes:
    """16 bytes that stand for the draw."""
    return hashlib.blake2b(_text([seed, purpose, *parts]).encode(), digest_size=16).digest()


def _text(parts: Sequence[str | int]) -> str:
    """What `json.dumps` makes of a list, which sets up an encoder every time, in a quarter of the time."""
    return f"[{', '.join([encode_basestring_ascii(part) if isinstance(part, str) else str(part) for part in parts])}]"


def integer(seed: int, purpose: str, *parts: str | int) -> int:
    """Draw a seed for another generator.

    Args:
        seed: The seed of the environment or partition.
        purpose: What is drawn.
        *parts: Run, round, client and whatever else tells this draw from others.

    Returns:
        A whole number in [0, 2⁶³).
    """
    return int.from_bytes(_digest(seed, purpose, *parts)[:8], "little") >> 1


def uniforms(seed: int, purpose: str, parts: Sequence[str | int], last: Sequence[str]) -> np.ndarray:
    """Draw a number for each of many clients, uniform in [0, 1); what their names share is hashed once.

    Args:
        seed: The seed of the environment or partition.
        purpose: What is drawn.
        parts: Run, round and whatever else tells these draws from others.
        last: What tells them from each other, the ids of clients.

    Returns:
        The numbers, as many as `last` has; each depends on its own id alone.
    """
    shared = hashlib.blake2b(f"{_text([seed, purpose, *parts])[:-1]}, ".encode(), digest_size=16)
    digests = []
    for part in last:
        own = shared.copy()
        own.update(f"{encode_basestring_ascii(part)}]".encode())
        digests.append(own.digest()[:8])
    return (np.frombuffer(b"".join(digests), dtype="<u8") >> 11) / 2.0**53


def generator(seed: int, purpose: str, *parts: str | int) -> np.random.Generator:
    """Make a numpy generator of its own; arguments as for `integer`.

    Returns:
        Philox, which is counter-based, so that streams with other keys never overlap.
    """
    return np.random.Generator(np.random.Philox(key=philox_key(seed, purpose, *parts)))


def philox_key(seed: int, purpose: str, *parts: str | int) -> np.ndarray:
    """The two numbers of 64 bits that a Philox stream begins with; arguments as for `integer`."""
    return np.frombuffer(_digest(seed, purpose, *parts), dtype=np.uint64)


def permutation(size: int, key: np.ndarray) -> np.ndarray:
    """What a new generator with that key gives as `permutation(size)`, without the price of a new generator.

    A new Philox reads entropy from the system that a key then overrides, which takes as long as shuffling a thousand
    rows. So every thread has one, and sets it to the beginning of the stream it needs.

    Args:
        size: How many numbers are permuted.
        key: The stream, from `philox_key`.

    Returns:
        0, …, size − 1 in random order.
    """
    if not hasattr(_own, "bits"):
        _own.bits = np.random.Philox(key=0)
        _own.start = _own.bits.state  # a copy: the beginning of a stream, whatever its key
    _own.start["state"]["key"] = key
    _own.bits.state = _own.start
    return np.random.Generator(_own.bits).permutation(size)


_own = threading.local()
