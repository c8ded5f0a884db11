"""The metric by which models are compared: its name, its direction, and how it is shown."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedunfold.core.task import Task


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
        'micro f1'
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


ACCURACY = PrimaryMetric()
"""That of a classifier."""


def words(name: str) -> str:
    """A metric's name in words."""
    return name.replace("_", " ")


def finite(value: float) -> float | None:
    """A number that JSON has a word for; None where there is none."""
    return value if math.isfinite(value) else None
