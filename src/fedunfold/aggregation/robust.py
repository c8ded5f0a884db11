"""Aggregators: how updates become one direction, also so that a few bad ones cannot take the model where they like.

With α_k of the weights Θ (`absent`) over the n updates m_k that enter a round, A = Σ_k α_k and a_k = α_k/A, the
direction is u = A · R(m; a), where R is

| name          | R(m; a)                                                                                           |
|---------------|---------------------------------------------------------------------------------------------------|
| mean          | Σ_k a_k m_k                                                                                       |
| median        | in every coordinate the weighted median: half of the weight below, half above                     |
| trimmed-mean(β) | in every coordinate the mean of what is left without the weight β at either end                   |
| krum(f)       | Σ_k a_k m_k / Σ_k a_k over the n − f updates with the lowest scores                               |

The score of m_k is the sum of its squared distances to its n − f − 2 nearest others. With equal weights these are the
published rules. With others, bad clients are held off while their *weight* stays below a half, below β, or (krum)
while they are f or fewer of at least 2f + 3: in a round with fewer, u = 0.

Updates are compared as they come. Where clients train unequally long their norms differ for that alone, so take a
local optimiser that scales all to the same number of steps (nova). All three hold off what is rare, and cannot tell a
bad client from an honest one that alone holds some class.

References: Yin, Chen, Ramchandran and Bartlett 2018, Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates (median, trimmed mean); Blanchard, El Mhamdi, Guerraoui and Stainer 2017, Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent (Krum and multi-Krum).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import AGGREGATORS, Aggregator

TIE = 1e-9  # sums of shares that meet a half up to rounding meet it


@AGGREGATORS.register("mean")
@dataclass(frozen=True)
class Mean(Aggregator):
    """The weighted mean: every update counts as far as its weight goes.

    >>> Mean().combine(torch.tensor([[0.0], [1.0], [8.0]]), torch.ones(3) / 3, ParamLayout()).tolist()
    [3.0]
    """

    name: ClassVar[str] = "mean"
    is_linear: ClassVar[bool] = True

    def combine(self, updates: Tensor, coefficients: Tensor, layout: ParamLayout) -> Tensor:
        return coefficients.to(updates.device, updates.dtype, non_blocking=updates.is_cuda) @ updates


@dataclass(frozen=True)
class _Robust(Aggregator):
    """u = A · R(m; a), and 0 where there are too few updates or none has any weight."""

    def combine(self, updates: Tensor, coefficients: Tensor, layout: ParamLayout) -> Tensor:
        alpha = coefficients.to(updates.device, updates.dtype)
        total = alpha.sum()
        if len(updates) < max(1, self.min_updates) or not bool(total > 0):
            return updates.new_zeros(updates.shape[1])
        return total * self._center(updates, alpha / total, layout)

    def _center(self, updates: Tensor, shares: Tensor, layout: ParamLayout) -> Tensor:
        """R(m; a), coordinate by coordinate."""
        values, order = updates.sort(0)
        return self._coordinate(values, shares.double()[order])

    def _coordinate(self, values: Tensor, shares: Tensor) -> Tensor:
        """R of sorted values [n, d] with their shares [n, d]."""
        raise NotImplementedError


@AGGREGATORS.register("median")
@dataclass(frozen=True)
class Median(_Robust):
    """The coordinate-wise median: nobody with less than half of the weight can move it far. The most cautious.

    >>> Median().combine(torch.tensor([[1.0], [2.0], [90.0]]), torch.ones(3) / 3, ParamLayout()).tolist()
    [2.0]
    """

    name: ClassVar[str] = "median"

    def _coordinate(self, values: Tensor, shares: Tensor) -> Tensor:
        """Between the first value that half of the weight does not exceed and the first that more than half does."""
        end, last = shares.cumsum(0), len(values) - 1
        lower = (end < 0.5 - TIE).sum(0, keepdim=True).clamp(max=last)
        upper = (end <= 0.5 + TIE).sum(0, keepdim=True).clamp(max=last)
        return (values.gather(0, lower) + values.gather(0, upper))[0] / 2


@AGGREGATORS.register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(_Robust):
    """The coordinate-wise trimmed mean: closer to the mean than the median, safe up to a fraction β of the weight.

    Attributes:
        fraction: β, which is cut off either end, 0 < β < 0.5.

    >>> updates = torch.tensor([[1.0], [2.0], [4.0], [90.0]])
    >>> TrimmedMean(fraction=0.25).combine(updates, torch.ones(4) / 4, ParamLayout()).tolist()
    [3.0]
    """

    name: ClassVar[str] = "trimmed-mean"
    fraction: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 0.5:
            raise InputError(f"a trimmed mean cuts a fraction between 0 and 0.5 off either end, not {self.fraction}.")

    def _coordinate(self, values: Tensor, shares: Tensor) -> Tensor:
        """The mean over the part of the weight that lies between β and 1 − β."""
        end = shares.cumsum(0)
        inside = end.clamp(max=1 - self.fraction) - (end - shares).clamp(min=self.fraction)
        inside = inside.clamp(min=0)
        return ((inside * values).sum(0) / inside.sum(0)).to(values)


@AGGREGATORS.register("krum")
@dataclass(frozen=True)
class Krum(_Robust):
    """Multi-Krum: leave out the f updates that lie farthest from the others, and weight the rest.

    Attributes:
        num_byzantine: f, how many clients are expected to be bad, at least 1.

    >>> updates = torch.tensor([[1.0], [1.0], [2.0], [2.0], [90.0]])
    >>> Krum(num_byzantine=1).combine(updates, torch.ones(5) / 5, ParamLayout()).tolist()
    [1.5]
    """

    name: ClassVar[str] = "krum"
    num_byzantine: int = 1

    def __post_init__(self) -> None:
        if not (self.num_byzantine >= 1 and self.num_byzantine == self.num_byzantine // 1):
            raise InputError(f"krum expects a whole number of bad clients, at least 1, not {self.num_byzantine}.")
        object.__setattr__(self, "num_byzantine", int(self.num_byzantine))  # 1.0, from a description such as krum:…=1

    @property
    def min_updates(self) -> int:
        return 2 * self.num_byzantine + 3

    def check_enough(self, clients: int) -> None:
        if clients < self.min_updates:
            raise InputError(
                f"krum with {self.num_byzantine} bad clients needs at least {self.min_updates} clients, and there are "
                f"{clients}; expect fewer bad ones, or choose the median or the trimmed mean."
            )

    def _center(self, updates: Tensor, shares: Tensor, layout: ParamLayout) -> Tensor:
        """Buffers do not count in distances."""
        chosen = self._nearest(layout.params(updates))
        share = shares[chosen].sum()
        return shares[chosen] @ updates[chosen] / share if bool(share > 0) else 0 * updates[0]

    def _nearest(self, updates: Tensor) -> Tensor:
        """The n − f with the lowest scores, in their old order."""
        wide = updates.double()
        distances = torch.cdist(wide, wide, compute_mode="donot_use_mm_for_euclid_dist").square()
        n = len(updates)
        nearest = distances.sort(1).values[:, 1 : n - self.num_byzantine - 1]  # without itself
        return nearest.sum(1).argsort(stable=True)[: n - self.num_byzantine].sort().values
