"""Means and deviations over all sites, from three numbers of each."""

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedunfold.core.settings import Count, Settings

ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""A deviation below this part of the mean is what rounding leaves of a constant column."""


class Moments(Settings):
    """What a mean and a deviation need of n_k numbers.

    The squares are those of deviations from the site's own mean: a sum of raw squares would lose all digits of a small
    deviation beside a large mean, as dates and times have.

    Attributes:
        count: n_k.
        sum: S_k = Σ x.
        squares: Q_k = Σ (x − S_k/n_k)².

    >>> Moments.of(np.array([1.0, 3.0]))
    Moments(count=2, sum=4.0, squares=2.0)
    """

    count: Count
    sum: float
    squares: float = Field(ge=0)

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Moments":
        """Those of some numbers, without NaN."""
        total = math.fsum(values)
        return cls(count=len(values), sum=total, squares=math.fsum(np.square(values - total / len(values))))

    @property
    def mean(self) -> float:
        """S_k/n_k."""
        return self.sum / self.count


def pool(parts: Sequence[Moments]) -> tuple[float, float]:
    """The mean and standard deviation of all sites' numbers.

    With n = Σ_k n_k: mean = Σ_k S_k / n, and deviation² = Σ_k [Q_k + n_k (S_k/n_k − mean)²] / n.

    Args:
        parts: One for each site.

    Returns:
        (mean, deviation); 0 for a deviation that is rounding alone.

    Reference:
        Chan, Golub and LeVeque 1983, Algorithms for computing the sample variance.

    >>> pool([Moments.of(np.array([1.0, 3.0])), Moments.of(np.array([5.0, 7.0, 9.0]))])  # √(40/5)
    (5.0, 2.8284271247461903)
    """
    n = sum(part.count for part in parts)
    mean = math.fsum(part.sum for part in parts) / n
    squares = math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
    deviation = math.sqrt(squares / n)
    return mean, deviation if deviation > ROUNDING * abs(mean) else 0.0


def rounded_range(values: NDArray[Any]) -> tuple[float, float]:
    """The smallest and the largest number, rounded outwards to two digits of the larger one.

    So neither is, in general, a number that somebody has.

    >>> rounded_range(np.array([17.99, 20.5, 28.11])), rounded_range(np.array([-3.14, 0.0]))
    ((17.0, 29.0), (-3.2, 0.0))
    """
    low, high = Decimal(float(values.min())), Decimal(float(values.max()))
    step = Decimal(1).scaleb(max(abs(low), abs(high)).adjusted() - 1)
    return float(low.quantize(step, ROUND_FLOOR)), float(high.quantize(step, ROUND_CEILING))
