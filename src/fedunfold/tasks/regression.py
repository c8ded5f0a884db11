"""One number or several."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task


@TASKS.register("regression")
@dataclass(frozen=True)
class Regression(Task):
    """Numbers: ℓ is the mean over the outputs of (z − y)², or of Huber's loss, for outputs [B, D] and targets alike.

    Targets [B] are those of one output. Metrics: the root of the mean squared error, the mean absolute error, and R²,
    each the mean over the outputs but for the first, which is over all numbers.

    Attributes:
        loss: "mse" or "huber".
        delta: Where Huber's loss turns from squared to linear.
        outputs: D.

    >>> task = Regression()
    >>> task.metrics(task.statistics(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [5.0]])))["r2"]
    0.5
    """

    name: ClassVar[str] = "regression"
    primary: ClassVar[str] = "rmse"
    greater_is_better: ClassVar[bool] = False
    loss: Literal["mse", "huber"] = "mse"
    delta: float = 1.0
    outputs: int = 1

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "huber"):
            raise InputError(f"the loss of a regression is mse or huber, not {self.loss!r}.")
        if not (self.delta > 0 and isinstance(self.outputs, int) and self.outputs >= 1):
            raise InputError(f"regression needs a delta > 0 and 1 output or more, not {self.delta} and {self.outputs}.")

    @property
    def num_outputs(self) -> int:
        return self.outputs

    def check_targets(self, targets: NDArray[Any], name: str) -> NDArray[Any]:
        numbers = finite_numbers(targets, name).reshape(len(targets), -1)
        if targets.ndim > 2 or numbers.shape[1] != self.outputs:
            raise InputError(f"{name} has shape {targets.shape}; give {self.outputs} number(s) a row.")
        return numbers

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        return len(targets), self.outputs

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs)
        if self.loss == "mse":
            return mse_loss(outputs, targets, reduction="none").mean(-1)
        return huber_loss(outputs, targets, reduction="none", delta=self.delta).mean(-1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y = targets.double()
        error = outputs.double() - y
        sums = [torch.ones_like(y), error.abs(), error.square(), y, y.square()]
        return torch.stack([values.sum(0) for values in sums]).flatten()

    def metrics(self, statistics: Tensor) -> dict[str, float]:
        count, absolute, squared, total, squares = statistics.view(5, self.outputs)
        spread = squares - total.square() / count
        r2 = torch.where(spread > 0, 1 - squared / spread, torch.nan)
        rmse = (squared.sum() / count.sum()).sqrt()
        return {"rmse": float(rmse), "mae": float((absolute / count).mean()), "r2": float(r2.mean())}


def finite_numbers(targets: NDArray[Any], name: str) -> NDArray[Any]:
    """Numbers as float32, all of them finite."""
    if targets.dtype.kind not in "uifb":
        raise InputError(f"{name} has type {targets.dtype}; give numbers.")
    result = targets.astype(np.float32)
    finite = np.isfinite(result).reshape(len(result), -1).all(axis=1)
    if not finite.all():
        raise InputError(f"{name} has a NaN or infinite value in row {int(np.argmin(finite))}; drop the row.")
    return result


def zeros_and_ones(targets: NDArray[Any], name: str, what: str) -> NDArray[Any]:
    """Numbers that are 0 or 1, as float32."""
    numbers = finite_numbers(targets, name)
    odd = ((numbers != 0) & (numbers != 1)).reshape(len(numbers), -1).any(axis=1)
    if odd.any():
        row = int(np.argmax(odd))
        raise InputError(f"{name} has {what} that is neither 0 nor 1 in row {row}; code it as 0 or 1.")
    return numbers
