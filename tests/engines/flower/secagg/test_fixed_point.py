"""Numbers as integers modulo 2⁶⁴: exact sums, a stated error, and nothing clipped."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.secagg.fixed_point import BOUND, decode, encode, error_bound

NUMBERS = st.floats(-BOUND, BOUND)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_a_sum_is_as_near_as_stated(numbers: list[float]) -> None:
    count = len(numbers)
    total = sum((encode(np.array([number]), count) for number in numbers), np.zeros(1, dtype=np.uint64))
    exact = sum(map(Fraction, numbers))
    # Beside the stated error, the double that comes out cannot be nearer than doubles lie.
    assert abs(Fraction(float(decode(total, count)[0])) - exact) <= error_bound(count) + abs(float(exact)) * 2**-53


@pytest.mark.parametrize("members", [2, 3, 8, 9, 1000])
@pytest.mark.parametrize("largest", [BOUND, -BOUND])
def test_the_largest_numbers_of_all_do_not_run_over(members: int, largest: float) -> None:
    total = encode(np.full(1, largest), members) * np.uint64(members)
    assert decode(total, members)[0] == members * largest


def test_the_error_that_is_documented() -> None:
    assert error_bound(5) < 3e-13
    assert error_bound(100) < 1e-10


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.nextafter(BOUND, np.inf)])
def test_what_is_beyond_the_bound_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="not finite or beyond ±65536"):
        encode(np.array([0.0, bad]), 3)
