"""What is said of many federations: intervals over them, win rates, rounds to a score as a part of all."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from fedunfold.studies.benchmark.statistics import Interval, interval, rounds_to

TIE = 0.25
"""A difference of at most so many points is a tie."""


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


def part_of_rounds(curve: Sequence[float], target: float) -> float:
    """The first round that reaches the target as a part of all rounds; 1 where none does.

    >>> part_of_rounds([0.5, 0.7, 0.8, 0.9], 0.7), part_of_rounds([0.5, 0.7], 0.9)
    (0.5, 1.0)
    """
    return (rounds_to(curve, target) or len(curve)) / len(curve)
