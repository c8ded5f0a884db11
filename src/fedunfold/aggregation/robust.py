"""Putting updates together so that a few bad ones cannot take the model where they like.

With α_k of the weights Θ (`aggregation`) over the n updates m_k that enter a round, A = Σ_k α_k and a_k = α_k/A, the
direction is u = A · R(m; a), where R is

| name          | R(m; a)                                                                                           |
|---------------|---------------------------------------------------------------------------------------------------|
| mean          | Σ_k a_k m_k                                                                                       |
| median        | in every coordinate the weighted median: half of the weight below, half above                     |
| trimmed(β)    | in every coordinate the mean of what is left without the weight β at either end                   |
| krum(f)       | Σ_k a_k m_k / Σ_k a_k over the n − f updates with the lowest scores                               |

The score of m_k is the sum of its squared distances to its n − f − 2 nearest others. With equal weights these are the
published rules. With others, bad clients are held off while their *weight* stays below a half, below β, or (krum)
while they are f or fewer of at least 2f + 3: in a round with fewer, u = 0.

Updates are compared as they come. Where clients train unequally long their lengths differ for that alone, so take a
local update that scales all to the same number of steps (nova). All three hold off what is rare, and cannot tell a bad
client from an honest one that alone holds some class.

References: Yin, Chen, Ramchandran and Bartlett 2018, Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates (median, trimmed mean); Blanchard, El Mhamdi, Guerraoui and Stainer 2017, Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent (Krum and multi-Krum).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedunfold.core.errors import InputError

AggregatorName = Literal["mean", "median", "trimmed", "krum"]
TIE = 1e-9  # sums of shares that meet a half up to rounding meet it


@dataclass(frozen=True)
class Aggregator:
    """A row of the table above; β is `share`, f is `bad`."""

    name: AggregatorName = "mean"
    share: float = 0.0
    bad: int = 0

    def __post_init__(self) -> None:
        if self.name not in get_args(AggregatorName):
            raise InputError(f"unknown aggregation '{self.name}'; choose one of {', '.join(get_args(AggregatorName))}.")
        if self.name == "trimmed" and not 0 < self.share < 0.5:
            raise InputError(f"a trimmed mean cuts a share between 0 and 0.5 off either end, not {self.share}.")
        if self.name == "krum" and not (isinstance(self.bad, int) and self.bad >= 1):
            raise InputError(f"krum expects a whole number of bad clients, at least 1, not {self.bad}.")

    @property
    def needed(self) -> int:
        """How many updates a round needs for a step."""
        return 2 * self.bad + 3 if self.name == "krum" else 0

    def check_enough(self, clients: int) -> None:
        """Refuse a federation in which no round can have a step."""
        if clients < self.needed:
            raise InputError(
                f"{self.name} with {self.bad} bad clients needs at least {self.needed} clients, and there are "
                f"{clients}; expect fewer bad ones, or take median or trimmed."
            )

    def combine(self, updates: Tensor, coefficients: Tensor, statistics: int = 0) -> Tensor:
        """u from m [n, d] and α [n]; 0 where they are fewer than needed, or have no weight.

        The last `statistics` numbers of an update, running statistics, do not count in distances.

        >>> updates = torch.tensor([[0.0], [1.0], [8.0]])
        >>> [float(rule.combine(updates, torch.ones(3) / 3)) for rule in (mean(), median(), trimmed(1 / 3))]
        [3.0, 1.0, 1.0]
        """
        alpha = coefficients.to(updates.device, updates.dtype, non_blocking=updates.is_cuda)
        if self.name == "mean":
            return alpha @ updates
        total = alpha.sum()
        if len(updates) < max(1, self.needed) or not bool(total > 0):
            return updates.new_zeros(updates.shape[1])
        if self.name == "krum":
            chosen = self._nearest(updates[:, : updates.shape[1] - statistics])
            share = alpha[chosen].sum()
            return total * (alpha[chosen] @ updates[chosen]) / share if bool(share > 0) else 0 * updates[0]
        values, order = updates.sort(0)
        shares = (alpha.double() / total)[order]
        return total * (_median(values, shares) if self.name == "median" else self._trimmed(values, shares))

    def _nearest(self, updates: Tensor) -> Tensor:
        """The n − f with the lowest scores, in their old order."""
        wide = updates.double()
        distances = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
        n = len(updates)
        nearest = distances.sort(1).values[:, 1 : n - self.bad - 1]  # without itself
        return nearest.sum(1).argsort(stable=True)[: n - self.bad].sort().values

    def _trimmed(self, values: Tensor, shares: Tensor) -> Tensor:
        """The mean over the part of the weight that lies between β and 1 − β."""
        end = shares.cumsum(0)
        kept = end.clamp(max=1 - self.share) - (end - shares).clamp(min=self.share)
        kept = kept.clamp(min=0)
        return ((kept * values).sum(0) / kept.sum(0)).to(values)


def _median(values: Tensor, shares: Tensor) -> Tensor:
    """Between the first value that half of the weight does not exceed and the first that more than half does not."""
    end = shares.cumsum(0)
    last = len(values) - 1
    lower = (end < 0.5 - TIE).sum(0, keepdim=True).clamp(max=last)
    upper = (end <= 0.5 + TIE).sum(0, keepdim=True).clamp(max=last)
    return (values.gather(0, lower) + values.gather(0, upper))[0] / 2


def mean() -> Aggregator:
    """The weighted mean: every update counts as far as its weight goes."""
    return Aggregator()


def median() -> Aggregator:
    """The coordinate-wise median: nobody with less than half of the weight can move it far. The most cautious.

    >>> median().combine(torch.tensor([[1.0], [2.0], [90.0]]), torch.ones(3) / 3).tolist()
    [2.0]
    """
    return Aggregator("median")


def trimmed(share: float = 0.2) -> Aggregator:
    """The coordinate-wise trimmed mean: closer to the mean than the median, safe up to `share` of the weight.

    >>> trimmed(share=0.25).combine(torch.tensor([[1.0], [2.0], [4.0], [90.0]]), torch.ones(4) / 4).tolist()
    [3.0]
    """
    return Aggregator("trimmed", share=share)


def krum(bad: float = 1) -> Aggregator:
    """Multi-Krum: leave out the `bad` updates that lie farthest from the others, and weigh the rest.

    >>> krum(bad=1).combine(torch.tensor([[1.0], [1.0], [2.0], [2.0], [90.0]]), torch.ones(5) / 5).tolist()
    [1.5]
    """
    if not (math.isfinite(bad) and bad == int(bad)):
        raise InputError(f"krum expects a whole number of bad clients, at least 1, not {bad}.")
    return Aggregator("krum", bad=int(bad))
