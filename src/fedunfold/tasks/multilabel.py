"""Any of C labels at once."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks.regression import zeros_and_ones


@TASKS.register("multilabel")
@dataclass(frozen=True)
class Multilabel(Task):
    """Any of C labels: ℓ is the mean of the labels' binary cross-entropies, for logits and targets 0 or 1 [B, C].

    Metrics: F1, the mean of the labels' (0 for a label that neither occurs nor is predicted, as in scikit-learn), micro
    F1 over all labels' decisions, and accuracy, the fraction of rows with all labels right. A label is predicted where
    its logit is above 0.

    Attributes:
        labels: C.

    >>> task = Multilabel(2)
    >>> task.metrics(task.statistics(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
    {'f1': 0.8333333333333333, 'micro_f1': 0.8, 'accuracy': 0.5}
    """

    name: ClassVar[str] = "multilabel"
    primary: ClassVar[str] = "f1"
    percentages: ClassVar[frozenset[str]] = frozenset({"f1", "micro_f1", "accuracy"})
    labels: int

    def __post_init__(self) -> None:
        if not (isinstance(self.labels, int) and self.labels >= 1):
            raise InputError(f"a multi-label task has at least 1 label, not {self.labels}.")

    @property
    def num_outputs(self) -> int:
        return self.labels

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.shape[1:] != (self.labels,):
            raise InputError(f"{name} has shape {targets.shape}; give 0 or 1 for each of the {self.labels} labels.")
        return zeros_and_ones(targets, name, "a label")

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), self.labels

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none").mean(-1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, wanted = outputs > 0, targets > 0.5
        counts = torch.stack([(predicted & wanted).sum(0), predicted.sum(0), wanted.sum(0)]).double()
        exact = (predicted == wanted).all(-1).sum()
        return torch.cat([counts.flatten(), torch.stack([exact, exact.new_tensor(len(targets))]).double()])

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        right, predicted, wanted = statistics[:-2].view(3, self.labels)
        f1 = 2 * right / (predicted + wanted).clamp(min=1)
        micro = 2 * right.sum() / (predicted + wanted).sum().clamp(min=1)
        return {"f1": float(f1.mean()), "micro_f1": float(micro), "accuracy": float(statistics[-2] / statistics[-1])}
