"""A task made of a user's own functions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.task import Task

RowFunction = Callable[[Tensor, Tensor], Tensor]
"""From outputs [B, …] and targets [B, …] to a number for every row, [B]."""


@dataclass(frozen=True)
class CustomTask(Task):
    """Any loss of rows, with metrics that are means over rows. Made by `task`."""

    least_loss: ClassVar[float] = -math.inf
    loss: RowFunction
    row_metrics: tuple[tuple[str, RowFunction], ...]
    outputs: int

    @property
    def num_outputs(self) -> int:
        return self.outputs

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "primary": self.primary}

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        if targets.dtype.kind not in "uifb":
            raise InputError(f"{name} has type {targets.dtype}; give numbers.")
        return targets.astype(np.float32) if targets.dtype.kind == "f" else targets

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), self.outputs

    def check_outputs(self, outputs: Any, targets: Tensor) -> Tensor:
        """Whatever the user's own loss takes."""
        if not isinstance(outputs, Tensor) or len(outputs) != len(targets):
            raise InputError(f"the model must give a tensor with a row for each of the {len(targets)} rows.")
        for label, function in (("loss", self.loss), *self.row_metrics):
            found = function(outputs, targets)
            if not isinstance(found, Tensor) or found.shape != targets.shape[:1]:
                raise InputError(f"the {label} of the task '{self.name}' must give a number for every row, [B].")
        return outputs

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets).to(outputs.dtype)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        sums = [function(outputs, targets).double().sum() for _, function in self.row_metrics]
        return torch.stack([*sums, sums[0].new_tensor(len(targets))])

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        means = statistics[:-1] / statistics[-1]
        return {name: float(mean) for (name, _), mean in zip(self.row_metrics, means, strict=True)}


def task(
    name: str,
    loss: RowFunction,
    metrics: Mapping[str, RowFunction],
    *,
    greater_is_better: bool = True,
    rows_interact: bool = False,
    outputs: int = 1,
) -> CustomTask:
    """Make a task of functions.

    Args:
        name: What it is called in tables.
        loss: (outputs, targets) -> the loss of every row, [B], by operations that torch differentiates.
        metrics: By name (outputs, targets) -> a number for every row, whose mean is the metric; the first one is the
            primary one.
        greater_is_better: The direction of the primary metric.
        rows_interact: Whether a row's loss depends on the other rows of its minibatch.
        outputs: Outputs of the built-in perceptron; a model of your own may give any shape.

    Returns:
        The task, for `Environment.from_arrays` and `Environment.from_datasets`.

    >>> quantile = task(
    ...     "median",
    ...     loss=lambda z, y: (z[:, 0] - y).abs(),
    ...     metrics={"mae": lambda z, y: (z[:, 0] - y).abs()},
    ...     greater_is_better=False,
    ... )
    >>> quantile.metrics(quantile.statistics(torch.zeros(2, 1), torch.tensor([1.0, 3.0])))
    {'mae': 2.0}
    """
    if not metrics:
        raise InputError(f"the task '{name}' needs at least one metric.")
    primary, *_ = metrics
    common = {"name": name, "primary": primary}
    directions = {"greater_is_better": greater_is_better, "rows_interact": rows_interact}
    made: type[CustomTask] = type("CustomTask", (CustomTask,), common | directions)
    return made(loss, tuple(metrics.items()), outputs)
