"""Samples, read by models that do not move: by compiled code where there is some, else by torch."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.task import OuterLoss
from fedunfold.core.threading import threads_for
from fedunfold.engines.simulation.backends.cpu import SparseRows, evaluate_outer, predict
from fedunfold.engines.simulation.backends.cpu import is_supported as can_call
from fedunfold.engines.simulation.fixed_model import outer_loss, predictions
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.schedule import upload


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Rows x and labels y where they are computed on, for models of one kernel; reading may take so many threads.

    `places` are numbers of rows, ascending.
    """

    kernel: Kernel
    x: Tensor
    y: Tensor
    threads: int

    @cached_property
    def compiled_stack(self) -> MLPKernel | None:
        """The kernel, if compiled code on the CPU knows it; what it does has no need of torch's threads."""
        kernel = self.kernel
        return kernel if isinstance(kernel, MLPKernel) and all(kernel.biased) and can_call(self.x) else None

    @cached_property
    def rows(self) -> SparseRows:
        """x as compiled code reads it, which takes it that labels are classes."""
        classes = self.kernel.shapes[-1].numel()
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < classes:
            raise ValueError(f"there are labels other than 0 to {classes - 1}.")
        return SparseRows.from_dense(self.x)

    def tensor(self, values: np.ndarray) -> Tensor:
        """Other numbers where the samples are, and as precise."""
        return upload(values, self.x.device, self.x.dtype)

    def outer(self, model: Tensor, places: np.ndarray, coefficients: Tensor, loss: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w) over some rows, and its gradient in w."""
        stack = self.compiled_stack
        if stack is not None and loss.is_cross_entropy:
            return evaluate_outer(stack, self.rows, self.y, model, places, coefficients, self.threads)
        some = self._some(places)
        with threads_for(len(places) * len(model), self.threads):
            return outer_loss(self.kernel, model, self.x[some], self.y[some], coefficients, loss)

    def predictions(self, model: Tensor, places: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Predicted class argmax_c z_ic and cross-entropy log Σ_c e^{z_ic} − z_{i y_i} of some rows, or of all."""
        places = np.arange(len(self.y), dtype=np.int32) if places is None else places
        stack = self.compiled_stack
        # Compiled code leaves out products with 0, also those that are not 0: with a weight that is not finite.
        if stack is not None and _is_finite(model):
            return predict(stack, self.rows, self.y, model, places, self.threads)
        some = self._some(places)
        with threads_for(len(places) * len(model), self.threads):
            predicted, losses = predictions(self.kernel, model[None], self.x[some], self.y[some])
            return predicted[0], losses[0]

    def predictions_together(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """The same of all rows, [R, N], for models [R, d]; a GPU has them read side by side."""
        if self.x.device.type != "cpu":
            return predictions(self.kernel, models, self.x, self.y)
        predicted, losses = zip(*(self.predictions(model) for model in models), strict=True)
        return torch.stack(predicted), torch.stack(losses)

    def _some(self, places: np.ndarray) -> Tensor | slice:
        """Places as an index; a slice, which copies nothing, where none between them is left out."""
        if len(places) and places[-1] - places[0] == len(places) - 1:
            return slice(int(places[0]), int(places[-1]) + 1)
        return upload(places, self.x.device)


def _is_finite(model: Tensor) -> bool:
    """0 · w is NaN where w is not finite: a tenth of the time that `torch.isfinite` takes."""
    return float((model * 0).sum()) == 0
