"""What a rule is judged by while it is learned.

The cross-entropy would not do. It grows without bound with the confidence in a wrong answer, which accuracy does not
depend on: a server that takes long steps is often right more often and surer where it is wrong
(`python -m benchmarks losses`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.row_losses import Slopes
from fedunfold.tasks.classification import Classification

POWER = 0.25
"""q. The larger, the nearer to the accuracy, and the less a class counts that the model never answers."""


@dataclass(frozen=True)
class TemperedLoss(Classification):
    """ℓ = (1 − p_y^q)/q,   p = softmax(z)

    as the cross-entropy where p_y is near 1, which is its limit q → 0, and never more than 1/q. Reference: Zhang and
    Sabuncu 2018, Generalized Cross Entropy Loss.

    >>> logits = torch.tensor([[0.0, 0.0], [200.0, 0.0]])
    >>> [round(float(loss), 2) for loss in TemperedLoss(2).losses(logits, torch.tensor([1, 1]))]
    [0.64, 4.0]
    """

    name: ClassVar[str] = "tempered"
    is_cross_entropy: ClassVar[bool] = False

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - _power(torch.log_softmax(outputs, -1), targets)) / POWER

    def values(self, outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        """∂ℓ/∂z = p_y^q (p − e_y)."""
        log_probabilities = torch.log_softmax(outputs, -1)
        power = _power(log_probabilities, targets)
        slopes = log_probabilities.exp()
        slopes.scatter_add_(-1, targets.unsqueeze(-1), slopes.new_full((), -1).expand_as(targets).unsqueeze(-1))
        return (1 - power) / POWER, lambda weights: slopes * (power * weights).unsqueeze(-1)


def _power(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """p_y^q."""
    return (POWER * log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).exp()
