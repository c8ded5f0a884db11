"""What a model is trained for: the loss of every row, metrics that merge over clients, the primary one among them, and
groups of rows.

A task is one file that registers itself (`fedunfold.tasks`); other packages add theirs by the entry-point group
`fedunfold.tasks`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import Part
from fedunfold.core.registry import Registry
from fedunfold.core.row_losses import Slopes, row_losses


@dataclass(frozen=True)
class Task(Part, ABC):
    """The loss of a minibatch b is Σ_{i∈b} c_i ℓ_i(outputs, targets), where local training has c_i = 1/|b|.

    ℓ_i depends on row i alone unless `rows_interact`: then it depends on the whole minibatch, as Cox's partial
    likelihood does on the risk set, and is only ever evaluated on real minibatches.

    A metric is computed from *statistics*, sums over rows that clients can add up without showing a row.
    """

    primary: ClassVar[str]
    """The metric by which models are compared."""
    greater_is_better: ClassVar[bool] = True
    """The direction of the primary metric."""
    percentages: ClassVar[frozenset[str]] = frozenset()
    """Metrics that are fractions and shown in percent."""
    rows_interact: ClassVar[bool] = False
    """Whether the loss of a row depends on the other rows of its minibatch."""
    is_cross_entropy: ClassVar[bool] = False
    """Whether ℓ_i = −log softmax(z_i)_{y_i} for logits [B, C]: compiled code knows this loss."""
    keeps_integers: ClassVar[bool] = False
    """Whether whole numbers as inputs are ids, such as tokens, and not measurements."""
    least_loss: ClassVar[float] = 0.0
    """What the mean loss of a minibatch is never below."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Outputs of a perceptron for the task."""

    @property
    def num_groups(self) -> int:
        """How many groups of rows there are for losses that balance them; 1 where balancing has no meaning."""
        return 1

    def groups(self, targets: Tensor) -> Tensor:
        """The group of every row, int64. Where there are several, rows may lie on any number of leading axes."""
        return torch.zeros(len(targets), dtype=torch.int64, device=targets.device)

    @abstractmethod
    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        """Targets in the type that `losses` takes.

        Args:
            targets: One row for each sample.
            name: What messages call them.

        Raises:
            InputError: They are none of this task; the message says what is wrong.
        """

    def check_minibatch(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        """The same for a few rows, which by themselves may lack what all of them have to have somewhere."""
        return self.check_targets(targets, name)

    @abstractmethod
    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """The shape that a model's outputs need for some targets."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ_i of every row of a minibatch, [B]; twice differentiable by autograd."""

    @abstractmethod
    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sums over rows from which metrics are computed, float64 [M]; those of several parts are added up."""

    @abstractmethod
    def metrics(self, statistics: Tensor) -> dict[str, float]:
        """The metrics of the rows behind the statistics; NaN where one is not defined for them."""

    def group_scores(self, statistics: Tensor) -> Tensor:
        """The accuracy on each class, [C]; empty where a task has no classes."""
        return torch.empty(0)

    def check_outputs(self, outputs: Any, targets: Tensor) -> Tensor:
        """A model's outputs for some rows, refused where they are not what the task needs."""
        needed = self.output_shape(targets)
        if not isinstance(outputs, Tensor) or outputs.shape != needed:
            given = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise InputError(
                f"the model gives {given} for {len(targets)} rows, where the task {self.name} needs outputs of shape "
                f"{list(needed)}."
            )
        return outputs

    def check_metrics(self, required: Collection[str]) -> None:
        """Refuse metrics that a weighting rule requires of clients and the task has not."""
        if "accuracy" in required and not self.is_cross_entropy:
            raise InputError(f"the rule needs clients' accuracies, which the task {self.name} has not.")

    def values(self, outputs: Tensor, targets: Tensor, counts: Sequence[int]) -> tuple[Tensor, Slopes]:
        """Losses of all rows of several minibatches, and the slopes of any weighted sum of them.

        Args:
            outputs: Of every minibatch, [L, B, …].
            targets: [L, B, …].
            counts: How many leading rows of each minibatch are real; others have the weight 0.
        """
        return row_losses(self.losses, outputs, targets, counts, rows_interact=self.rows_interact)


TASKS: Registry[Task] = Registry("task", "fedunfold.tasks", "fedunfold.tasks")


def task_text(task: Task) -> str:
    """A task in one line, by which it is compared: its name and settings.

    >>> from fedunfold.tasks import regression
    >>> task_text(regression("huber"))
    'regression:loss=huber,delta=1.0,outputs=1'
    """
    settings = [f"{key}={value}" for key, value in task.describe().items() if key != "name"]
    return ":".join(filter(None, [task.name, ",".join(settings)]))


@dataclass(frozen=True)
class PrimaryMetric:
    """A task's primary metric; without more, the accuracy of a classifier.

    Attributes:
        name: What it is called.
        greater_is_better: Its direction.
        percentages: The task's metrics that are fractions and shown in percent.

    >>> accuracy, error = PrimaryMetric(), PrimaryMetric("rmse", greater_is_better=False, percentages=frozenset())
    >>> accuracy.text(100 * 0.9312), error.text(53.1712)
    ('93.1', '53.17')
    >>> error.gain(50.0, over=53.0)
    3.0
    """

    name: str = "accuracy"
    greater_is_better: bool = True
    percentages: frozenset[str] = frozenset({"accuracy", "balanced_accuracy"})

    @classmethod
    def of(cls, task: Task) -> "PrimaryMetric":
        """That of a task."""
        return cls(task.primary, task.greater_is_better, task.percentages)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a classifier's accuracy."""
        return self.name == "accuracy" and self.is_percentage

    @property
    def is_percentage(self) -> bool:
        """Whether it is shown in percent."""
        return self.name in self.percentages

    @property
    def label(self) -> str:
        """Its name in words.

        >>> PrimaryMetric("micro_f1").label
        'micro F1'
        """
        return words(self.name)

    @property
    def direction(self) -> str:
        """What to add to its name where greater is not better."""
        return "" if self.greater_is_better else ", lower is better"

    def factor(self, name: str | None = None) -> float:
        """What one of the task's metrics, by default this one, is multiplied by to be shown."""
        return 100.0 if (self.name if name is None else name) in self.percentages else 1.0

    def unit(self, name: str | None = None) -> str:
        """What follows a value that is shown: " %" or nothing."""
        return " %" if self.factor(name) != 1 else ""

    def brackets(self, name: str | None = None) -> str:
        """That in brackets, behind a head of a table or of an axis."""
        return f" ({self.unit(name).strip()})" if self.unit(name) else ""

    def text(self, value: float, name: str | None = None) -> str:
        """A value that is shown, in words: one digit after the point in percent, else four that mean something."""
        return f"{value:.1f}" if self.factor(name) != 1 else f"{value:.4g}"

    def spread(self, mean: float, sd: float) -> str:
        """Mean and standard deviation that are shown, in words."""
        return f"{self.text(mean)} ± {f'{sd:.1f}' if self.is_percentage else f'{sd:.2g}'}"

    def gain(self, value: float, over: float) -> float:
        """How much better one value is than another."""
        return value - over if self.greater_is_better else over - value

    def shown(self, score: float, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """All metrics as they are shown, this one first; None where one is not a finite number."""
        return {name: finite(self.factor(name) * value) for name, value in ({self.name: score} | dict(metrics)).items()}

    def describe(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self) | {"percentages": sorted(self.percentages)}


ABBREVIATIONS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "auc": "AUC", "f1": "F1", "iou": "IoU"}

ACCURACY = PrimaryMetric()
"""That of a classifier."""


def words(name: str) -> str:
    """A metric's name in words.

    >>> words("balanced_accuracy"), words("rmse")
    ('balanced accuracy', 'RMSE')
    """
    return " ".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))


def finite(value: float) -> float | None:
    """A number that JSON has a word for; None where there is none."""
    return value if math.isfinite(value) else None
