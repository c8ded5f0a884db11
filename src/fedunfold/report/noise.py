"""How much of a difference between two methods may be noise: of training, and of a test set that is small."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedunfold.core.task import PrimaryMetric, finite
from fedunfold.runs.schema import Floats

TAIL = 0.025  # of a 95 % interval, on either side


@dataclass(frozen=True)
class Gain:
    """How much better one method is than another, with a 95 % confidence interval.

    With d_i the difference in trial i of n, s its standard deviation (n − 1), p and q the two mean accuracies as
    fractions and m the rows of the test set:

        d̄ ± √(t²_{0.975, n−1} s²/n + z²_{0.975} v),    v = (p(1 − p) + q(1 − q))/m

    v is the variance of the difference of two accuracies on m rows, were their errors independent. The errors of two
    models on the same rows are alike, so that their difference varies less: the interval is rather too wide. With one
    trial the first part is not known. The second is known for accuracies alone, where the rows are counted. What is not
    known is left out, and `covers` says so. Where the difference is the largest of several, 0.975 becomes
    1 − 0.025/several (Bonferroni): chance alone makes the largest of many large.

    Attributes:
        value: d̄, positive where the first method is better; fractions in percent.
        half: Half of the interval's width; None where neither part is known.
        covers: What the interval is about: "trials", "test samples" or both.
    """

    value: float
    half: float | None
    covers: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """Whether the interval excludes that there is no difference."""
        return self.half is not None and abs(self.value) > self.half

    @property
    def effect(self) -> float:
        """The difference in half-widths: above 1 it is more than noise; 0 where the noise is not known."""
        if self.half is None or self.value == 0:
            return 0.0
        return abs(self.value) / self.half if self.half else math.inf

    def interval(self, primary: PrimaryMetric) -> str:
        """Its bounds in words, and what they leave out."""
        if self.half is None:
            return "how much of it is noise is not known"
        low, high = (signed(primary, self.value + end) for end in (-self.half, self.half))
        if self.covers == ("test samples",):
            return f"95 % interval {low} to {high} over test samples alone: one trial does not tell how training varies"
        over = " and ".join(self.covers)
        return f"95 % interval {low} to {high} over {over}{' alone' if len(self.covers) < 2 else ''}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        ends = None if self.half is None else [finite(self.value - self.half), finite(self.value + self.half)]
        return {"gain": finite(self.value), "interval": ends, "covers": list(self.covers)}


def gain(
    mine: Floats,
    theirs: Floats,
    primary: PrimaryMetric,
    rows: Sequence[int | float],
    *,
    paired: bool = True,
    largest_of: int = 1,
) -> Gain:
    """How much better the first of two methods is, as the mean over some test sets.

    The variance over K test sets is that of their mean, Σ_k v_k/K².

    Args:
        mine: Its scores, [trials] or [trials, K], fractions in percent.
        theirs: The other's.
        primary: What scores are.
        rows: How many rows each test set has; 0 where that is not known.
        paired: Whether trial i of both drew the same. Else the variances s²/n of both are added, with the fewer degrees
            of freedom.
        largest_of: Of how many differences it was picked as the largest; the interval covers all of them together.

    >>> found = gain(np.array([80.0, 82.0]), np.array([70.0, 74.0]), PrimaryMetric(), [100])
    >>> found.value, round(found.half, 2)  # d = 10 and 8, so s²/n = 1, and v = (0.81·0.19 + 0.72·0.28)/100
    (9.0, 17.26)
    """
    from scipy.special import ndtri

    level = 1 - TAIL / largest_of
    first, second = (values.reshape(len(values), -1) for values in (mine, theirs))
    known = ~(np.isnan(first).any(0) | np.isnan(second).any(0))
    first, second = first[:, known], second[:, known]
    if not known.any():
        return Gain(math.nan, None, ())
    a, b = first.mean(1), second.mean(1)
    parts, covers = [], []
    if (varies := _over_trials(a, b, paired, level)) is not None:
        parts.append(varies)
        covers.append("trials")
    sizes = np.asarray(rows, dtype=float)[known]
    if primary.is_accuracy and (sizes > 0).all():
        p, q = first.mean(0) / 100, second.mean(0) / 100
        v = float(((p * (1 - p) + q * (1 - q)) / sizes).sum()) / len(sizes) ** 2
        parts.append((100 * float(ndtri(level))) ** 2 * v)
        covers.append("test samples")
    value = primary.gain(float(a.mean()), over=float(b.mean()))
    return Gain(value, math.sqrt(sum(parts)) if parts else None, tuple(covers))


def _over_trials(a: Floats, b: Floats, paired: bool, level: float) -> float | None:
    """t²_{level, n−1} times the variance of the mean difference over trials; None where it is not known."""
    from scipy.special import stdtrit

    n = min(len(a), len(b))
    if n < 2:
        return None
    if paired and len(a) == len(b):
        variance = float((a - b).var(ddof=1)) / n
    else:
        variance = float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b)
    return float(stdtrit(n - 1, level)) ** 2 * variance


def signed(primary: PrimaryMetric, value: float) -> str:
    """A difference with its sign.

    >>> signed(PrimaryMetric(), -3.25), signed(PrimaryMetric(), 0.04)
    ('−3.2', '+0.0')
    """
    return f"{'−' if value < 0 else '+'}{primary.text(abs(value))}"


def size(primary: PrimaryMetric, value: float) -> str:
    """How large a difference is, without its sign."""
    return primary.text(abs(value)) + (" points" if primary.is_percentage else "")
