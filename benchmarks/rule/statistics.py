"""What is said of runs: means, intervals of paired differences, win rates, rounds to a score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.stats import t as student

TIE = 0.25
"""A difference of at most so many points is a tie."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; NaN bounds where there is only one value.

    >>> Interval(1.0, 0.5, 1.5).text()
    '+1.00 [+0.50, +1.50]'
    """

    mean: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """It with its sign; without bounds that are not known, a dash where a run diverged."""
        if not math.isfinite(self.mean):
            return "–"
        mean, low, high = (f"{value:+.{digits}f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]" if math.isfinite(self.low) else mean

    def as_json(self) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in (self.mean, self.low, self.high)]


def interval(differences: Sequence[float]) -> Interval:
    """d̄ ± t_{0.975, n−1} sd(d)/√n.

    >>> found = interval([1.0, 2.0, 3.0])  # t = 4.303
    >>> round(found.low, 3), round(found.high, 3)
    (-0.484, 4.484)
    """
    mean = fmean(differences)
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return Interval(mean, math.nan, math.nan)
    half = float(student.ppf(0.975, len(differences) - 1)) * stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def clustered(differences: Mapping[str, Sequence[float]]) -> Interval:
    """The same for several trials of each federation: trials of one are alike, so each counts by its mean."""
    return interval([fmean(trials) for trials in differences.values()])


def win_rate(gains: Sequence[float], tie: float = TIE) -> float:
    """The part of gains above 0; a tie counts half.

    >>> win_rate([1.0, 0.25, -0.25, -2.0])
    0.5
    """
    return fmean(0.5 if abs(gain) <= tie else float(gain > 0) for gain in gains)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation."""
    return float(np.percentile(values, percent))


def rounds_to(curve: Sequence[float], target: float) -> float:
    """The first round that reaches the target as a part of all rounds; 1 where none does.

    >>> rounds_to([0.5, 0.7, 0.8, 0.9], 0.7), rounds_to([0.5, 0.7], 0.9)
    (0.5, 1.0)
    """
    return next((t / len(curve) for t, score in enumerate(curve, 1) if score >= target), 1.0)
