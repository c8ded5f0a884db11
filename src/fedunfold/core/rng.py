"""All randomness as a pure function of what it is for.

A draw depends on (seed, purpose, run, round, client key, epoch) and on nothing else: not on the order in
which clients are listed or trained, not on the device, not on the engine. `run` names the pass over the
federation: ``learn-3`` for the fourth outer iteration, ``trial-0`` for the first trial.
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
    """A seed for another generator, in [0, 2⁶³)."""
    return int.from_bytes(_digest(seed, purpose, *parts)[:8], "little") >> 1


def uniform(seed: int, purpose: str, *parts: str | int) -> float:
    """One number, uniform in [0, 1)."""
    return (int.from_bytes(_digest(seed, purpose, *parts)[:8], "little") >> 11) / 2.0**53


def generator(seed: int, purpose: str, *parts: str | int) -> np.random.Generator:
    """A numpy generator of its own (Philox: counter-based, so streams with other keys never overlap)."""
    return np.random.Generator(np.random.Philox(key=philox_key(seed, purpose, *parts)))


def philox_key(seed: int, purpose: str, *parts: str | int) -> np.ndarray:
    """The two numbers of 64 bits that a Philox stream begins with."""
    return np.frombuffer(_digest(seed, purpose, *parts), dtype=np.uint64)


def permutation(size: int, key: np.ndarray) -> np.ndarray:
    """What a new generator with that key gives as `permutation(size)`, without the price of a new generator.

    A new Philox asks the system for entropy that a key then overrides, which takes as long as shuffling a thousand
    rows. So every thread has one, and sets it to the beginning of the stream it needs.
    """
    bits = getattr(_own, "bits", None)
    if bits is None:
        bits = _own.bits = np.random.Philox()
    bits.state = {
        "bit_generator": "Philox",
        "state": {"counter": np.zeros(4, np.uint64), "key": key},
        "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits).permutation(size)


_own = threading.local()
