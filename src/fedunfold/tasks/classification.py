"""One of C classes, and one of two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.row_losses import Slopes
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks.cross_entropy import cross_entropy, cross_entropy_values

BINS = 1000
"""Of the histograms of scores from which the area under the ROC curve is computed."""


@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(Task):
    """One of C classes: ℓ = −log softmax(z)_y for logits z [B, C] and class numbers y from 0.

    Metrics: accuracy, and balanced accuracy, the mean of the classes' accuracies. The groups are the classes.

    Attributes:
        classes: C.

    >>> task = Classification(2)
    >>> logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 1])
    >>> {name: round(value, 3) for name, value in task.metrics(task.statistics(logits, y)).items()}
    {'accuracy': 0.667, 'balanced_accuracy': 0.75}
    """

    name: ClassVar[str] = "classification"
    primary: ClassVar[str] = "accuracy"
    percentages: ClassVar[frozenset[str]] = frozenset({"accuracy", "balanced_accuracy"})
    is_cross_entropy: ClassVar[bool] = True
    classes: int

    def __post_init__(self) -> None:
        if not (isinstance(self.classes, int) and self.classes >= 2):
            raise InputError(f"The labels make {self.classes} class(es); a classifier needs 2 or more.")

    @property
    def num_outputs(self) -> int:
        return self.classes

    @property
    def num_groups(self) -> int:
        return self.classes

    def groups(self, targets: Tensor) -> Tensor:
        return targets

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.ndim != 1:
            raise InputError(f"{name} has shape {targets.shape}; give one label a row.")
        return class_numbers(targets, name, self.classes)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), self.classes

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_values(outputs, targets)

    def values(self, outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        losses, slopes = cross_entropy(outputs, targets)
        return losses, lambda weights: slopes * weights.unsqueeze(-1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.class_counts(outputs.argmax(-1), targets)

    def class_counts(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """How many rows of each class are predicted right, and how many there are, [2 C]."""
        right = torch.bincount(targets[predicted == targets], minlength=self.classes)
        return torch.cat([right, torch.bincount(targets, minlength=self.classes)]).double()

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        right, count = torch.split(statistics[: 2 * self.classes], self.classes)
        present = count > 0
        return {
            "accuracy": float(right.sum() / count.sum()),
            "balanced_accuracy": float((right[present] / count[present]).mean()),
        }

    def group_scores(self, statistics: Tensor) -> Tensor:
        right, count = torch.split(statistics[: 2 * self.classes], self.classes)
        return right / count


@TASKS.register("binary")
@dataclass(frozen=True)
class Binary(Classification):
    """One of two classes, of which 1 is the positive one: ℓ = −log softmax(z)_y for logits z [B, 2].

    Metrics: accuracy, balanced accuracy, the area under the ROC curve from histograms of the score softmax(z)_1 in
    1,000 bins (scores of one bin count as equal), F1 of the positive class, and the Brier score mean (score − y)².

    >>> task = Binary()
    >>> logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 1, 0])
    >>> found = task.metrics(task.statistics(logits, y))
    >>> found["accuracy"], found["auc"], found["f1"]
    (0.5, 0.5, 0.5)
    """

    name: ClassVar[str] = "binary"
    percentages: ClassVar[frozenset[str]] = frozenset({"accuracy", "balanced_accuracy", "auc", "f1"})
    classes: int = 2

    def __post_init__(self) -> None:
        if self.classes != 2:
            raise InputError(f"a binary task has 2 classes, not {self.classes}.")

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = torch.softmax(outputs.double(), -1)[..., 1]
        bins = (scores * BINS).long().clamp(max=BINS - 1)
        histograms = torch.bincount(bins + BINS * targets, minlength=2 * BINS).double()
        positives = (outputs.argmax(-1) == 1).double().sum()
        brier = (scores - targets).square().sum()
        return torch.cat([super().statistics(outputs, targets), torch.stack([positives, brier]), histograms])

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        _, right, negatives, positives = statistics[:4]
        predicted, brier = statistics[4:6]
        below, above = torch.split(statistics[6:], BINS)
        pairs = (above * (below.cumsum(0) - below / 2)).sum()
        return super().metrics(statistics) | {
            "auc": float(pairs / (negatives * positives)),
            "f1": float(2 * right / (predicted + positives)),
            "brier": float(brier / (negatives + positives)),
        }


def class_numbers(targets: NDArray[Any], name: str, classes: int | None, ignored: int | None = None) -> NDArray[Any]:
    """Whole numbers from 0, below `classes` where that is given; `ignored` may stand in the place of one."""
    if targets.dtype.kind not in "ui":
        raise InputError(f"{name} has type {targets.dtype}; give class numbers as integers from 0.")
    real = targets if ignored is None else targets[targets != ignored]
    lowest, highest = int(real.min(initial=0)), int(real.max(initial=0))
    if lowest < 0:
        raise InputError(f"{name} has the label {lowest}; number the classes from 0.")
    if classes is not None and highest >= classes:
        raise InputError(f"{name} has the label {highest} but there are {classes} classes (0 to {classes - 1}).")
    return targets.astype(np.int64, copy=False)
