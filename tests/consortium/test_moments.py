"""Means, deviations and ranges over sites, against those of all numbers in one place."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.consortium.moments import Moments, pool, rounded_range

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)
SITES = st.lists(st.lists(NUMBERS, min_size=1, max_size=20), min_size=1, max_size=6)


def test_by_hand() -> None:
    """1, 3 at one site and 5, 7, 9 at another: the mean is 5, and 16 + 4 + 0 + 4 + 16 = 40 of five squares."""
    a, b = Moments.of(np.array([1.0, 3.0])), Moments.of(np.array([5.0, 7.0, 9.0]))
    assert (a.sum, a.squares, b.sum, b.squares) == (4, 2, 21, 8)
    assert pool([a, b]) == (5.0, math.sqrt(8))


@given(SITES)
def test_pooled_are_those_of_all_numbers(sites: list[list[float]]) -> None:
    together = np.array([number for own in sites for number in own])
    mean, deviation = pool([Moments.of(np.array(own)) for own in sites])
    size = np.abs(together).max()
    assert mean == pytest.approx(together.mean(), rel=1e-12, abs=1e-12 * size)
    assert deviation == pytest.approx(together.std(), rel=1e-6, abs=1e-12 * size)


@given(st.floats(-1e12, 1e12, allow_nan=False), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_a_constant_column_has_no_deviation(value: float, counts: list[int]) -> None:
    assert pool([Moments.of(np.full(count, value)) for count in counts])[1] == 0


def test_a_small_deviation_beside_a_large_mean_is_kept() -> None:
    """Times in seconds since 1970, of which raw squares would lose the deviation."""
    times = 1.7e9 + np.arange(10.0)
    assert pool([Moments.of(times[:4]), Moments.of(times[4:])])[1] == pytest.approx(times.std(), rel=1e-9)


# Numbers below 1e-307 have fewer digits than others, maybe not two.
@given(st.lists(st.floats(-1e30, 1e30, allow_nan=False, allow_subnormal=False), min_size=1, max_size=9))
def test_a_range_holds_all_numbers_and_has_two_digits(numbers: list[float]) -> None:
    low, high = rounded_range(np.array(numbers))
    assert low <= min(numbers) and max(numbers) <= high
    largest = max(abs(low), abs(high))
    for end in (low, high):
        digits = f"{abs(end):.14e}".rstrip("0123456789+-").split("e")[0].replace(".", "").rstrip("0")
        assert abs(end) < largest / 10 or len(digits) <= 3  # 99.9 becomes 100
