"""What is said of runs: intervals, areas, rounds to a score, ranks over environments, tests and their correction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import friedmanchisquare, rankdata, studentized_range
from scipy.stats import t as student

ALPHA = 0.05
"""What is called significant."""


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


def area(scores: Sequence[float]) -> float:
    """The area under the curve of scores as a part of its width, (1/T) Σ_t score_t: high where a method is fast.

    >>> area([10.0, 20.0, 30.0])
    20.0
    """
    return fmean(scores)


def rounds_to(curve: Sequence[float], target: float, *, greater_is_better: bool = True) -> int | None:
    """The first round, from 1, that reaches the target; None where none does.

    >>> rounds_to([0.5, 0.7, 0.8, 0.9], 0.7), rounds_to([0.5, 0.7], 0.9)
    (2, None)
    """
    sign = 1 if greater_is_better else -1
    return next((t for t, score in enumerate(curve, 1) if sign * score >= sign * target), None)


def ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """1 for the greatest; equal scores share the mean of their ranks.

    >>> ranks({"a": 1.0, "b": 3.0, "c": 1.0})
    {'a': 2.5, 'b': 1.0, 'c': 2.5}
    """
    return dict(zip(scores, rankdata([-score for score in scores.values()]).tolist(), strict=True))


def mean_ranks(environments: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each method's ranks, for methods that have a score in every environment."""
    each = [ranks(scores) for scores in environments]
    return {method: fmean(own[method] for own in each) for method in environments[0]}


def friedman(environments: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """(χ², p) that all methods are alike, corrected for ties; None for fewer than three methods or two environments.

    χ²_F = 12 N/(k(k+1)) (Σ_j R_j² − k(k+1)²/4)        without ties
    """
    methods = list(environments[0])
    if len(methods) < 3 or len(environments) < 2:
        return None
    columns = [[scores[method] for scores in environments] for method in methods]
    if all(len(set(scores.values())) == 1 for scores in environments):  # all tie everywhere
        return 0.0, 1.0
    found: Any = friedmanchisquare(*columns)
    return float(found.statistic), float(found.pvalue)


def critical_difference(methods: int, environments: int, alpha: float = ALPHA) -> float:
    """Nemenyi's: mean ranks that are further apart differ, CD = q_α √(k(k+1)/(6N)).

    q_α is the quantile of the studentized range for k groups and infinitely many degrees of freedom, over √2.

    Reference: Demšar 2006, Statistical Comparisons of Classifiers over Multiple Data Sets, section 3.2.2.

    >>> round(critical_difference(4, 14), 2)  # Demšar's example: q = 2.569
    1.25
    """
    q = float(studentized_range.ppf(1 - alpha, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * environments))


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t-test that the mean difference is 0; 1 for fewer than three differences, because two
    that happen to be equal would prove anything.

    Trials are paired: the same initial model, minibatches and absences. With five trials Wilcoxon's test could not come
    below p = 0.06 whatever the differences, so it is no choice here.

    >>> round(paired_p([1.0, 2.0, 3.0]), 4)  # t = 2/(1/√3) = 3.464
    0.0742
    """
    if len(differences) < 3:
        return 1.0
    mean, sd = fmean(differences), stdev(differences)
    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * student.sf(abs(mean) / (sd / math.sqrt(len(differences))), len(differences) - 1))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction of m p-values: of the ith smallest max_{j ≤ i} min(1, (m − j + 1) p_j), in the order given.

    >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, largest = [0.0] * len(values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - place) * values[i]))
        corrected[i] = largest
    return corrected
