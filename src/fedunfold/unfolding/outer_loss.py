"""Outer losses: what the aggregation weights are learned for.

Client k adds, over its minibatches b (E_k epochs of them) in every layer t of the unrolled run:

| name           | one minibatch                                 | client factor | layers |
|----------------|-----------------------------------------------|---------------|--------|
| path           | mean training loss                            | 1             | 0 … T  |
| sample         | mean training loss                            | 1/E_k         | 0 … T  |
| balanced       | Σ_i (N/(C n_{y_i})) ce_i / |b|                | 1/E_k         | 0 … T  |
| final          | as sample                                     | 1/E_k         | T      |
| final-balanced | as balanced                                   | 1/E_k         | T      |
| every-round    | as balanced                                   | 1/E_k         | 1 … T  |
| mse            | mean squared error of softmax against one-hot | 1             | 0 … T  |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import OUTER_LOSSES, OuterLoss
from fedunfold.core.row_losses import Slopes
from fedunfold.core.task import Task
from fedunfold.tasks.cross_entropy import squared_error


@OUTER_LOSSES.register("path")
@dataclass(frozen=True)
class Path(OuterLoss):
    """The published code's. It counts a client E_k times, so with unequal epochs it favours clients that train longer.

    >>> Path().per_epoch
    False
    """

    name: ClassVar[str] = "path"
    is_training_loss: ClassVar[bool] = True

    @property
    def is_training_gradient(self) -> bool:
        return not self.only_final

    def values(self, task: Task, outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        return task.values(outputs, targets, counts)


@OUTER_LOSSES.register("sample")
@dataclass(frozen=True)
class Sample(Path):
    """Every training sample counts the same, however many epochs its client trains."""

    name: ClassVar[str] = "sample"
    per_epoch: ClassVar[bool] = True


@OUTER_LOSSES.register("balanced")
@dataclass(frozen=True)
class Balanced(Sample):
    """The class-balanced objective that a class-balanced test measures; it needs only the label counts n_y."""

    name: ClassVar[str] = "balanced"

    @property
    def is_training_gradient(self) -> bool:
        return False

    def class_weights(self, label_counts: Tensor) -> Tensor | None:
        """N/(C n_y); 0 for a class nobody holds.

        >>> Balanced().class_weights(torch.tensor([[3, 0, 1], [2, 0, 0]])).tolist()
        [0.4, 0.0, 2.0]
        """
        counts = label_counts.sum(0).double()
        return torch.where(counts > 0, counts.sum() / (len(counts) * counts.clamp(min=1)), 0.0)


@OUTER_LOSSES.register("final")
@dataclass(frozen=True)
class Final(Sample):
    """The final model alone."""

    name: ClassVar[str] = "final"
    only_final: ClassVar[bool] = True


@OUTER_LOSSES.register("final-balanced")
@dataclass(frozen=True)
class FinalBalanced(Balanced):
    """The final model alone, class-balanced."""

    name: ClassVar[str] = "final-balanced"
    only_final: ClassVar[bool] = True


@OUTER_LOSSES.register("every-round")
@dataclass(frozen=True)
class EveryRound(FinalBalanced):
    """The model after every round, class-balanced, which is good at any time and not only in the end.

    Between rounds only: in layers 1 … T all clients' data meet w^(t), and local training adds nothing.
    """

    name: ClassVar[str] = "every-round"
    every_round: ClassVar[bool] = True


@OUTER_LOSSES.register("mse")
@dataclass(frozen=True)
class MSE(OuterLoss):
    """The paper's text: mean squared error of the softmax output against one-hot labels; for classification."""

    name: ClassVar[str] = "mse"

    def values(self, task: Task, outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        if not task.is_cross_entropy:
            raise InputError(f"the outer loss mse is for classification, not for {task.name}; choose path or sample.")
        losses, slopes = squared_error(outputs, targets)
        return losses, lambda weights: slopes * weights.unsqueeze(-1)
