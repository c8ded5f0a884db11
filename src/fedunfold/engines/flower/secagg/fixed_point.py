"""Real vectors as integers modulo 2⁶⁴, where masks hide them completely and sums are exact.

    v → ⌊2^f v⌉ mod 2⁶⁴,   f = 46 − ⌈log₂ n⌉ for a sum of n vectors,   |v_i| ≤ 2¹⁶

Rounding moves a coordinate of a vector by at most 2^−(f+1), so one of the sum by at most n 2^−(f+1): 3·10⁻¹³ for five
clients, 10⁻¹⁰ for a hundred. A vector that leaves the bound is refused; nothing is ever clipped.
"""

import numpy as np

from fedunfold.core.errors import InputError

BOUND = 2.0**16
ROOM = 62  # bits that the sum's magnitude may take; the 63rd is left free, the 64th is the sign


def fraction_bits(members: int) -> int:
    """f: so many that n numbers of the largest size add up to no more than 2⁶²."""
    return ROOM - int(np.log2(BOUND)) - (members - 1).bit_length()


def error_bound(members: int) -> float:
    """How far a coordinate of the sum can be off."""
    return members * 2.0 ** -(fraction_bits(members) + 1)


def encode(vector: np.ndarray, members: int) -> np.ndarray:
    """A vector for a sum of so many, [d] of uint64."""
    values = np.asarray(vector, dtype=np.float64)
    if not bool(np.all(np.abs(values) <= BOUND)):  # a NaN is not <= either
        raise InputError(
            f"a vector to be added up has a number that is not finite or beyond ±{BOUND:g}; lower the learning rate, "
            "or scale the features or the targets."
        )
    return np.rint(np.ldexp(values, fraction_bits(members))).astype(np.int64).view(np.uint64)


def decode(total: np.ndarray, members: int) -> np.ndarray:
    """A sum of encoded vectors as real numbers."""
    return np.ldexp(total.view(np.int64).astype(np.float64), -fraction_bits(members))
