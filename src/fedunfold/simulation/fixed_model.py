"""Passes over data with one model that does not move: the last layer, absent clients, accuracies, the test.

All minibatches meet the same model, so a sample's terms collapse into one coefficient and every client's
data is read once, whatever its number of epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.losses import OuterLoss, cross_entropy_values
from fedunfold.simulation.kernel import Batch, Kernel, Parameters, flatten, unflatten

ROWS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
"""As many as a processor's cache holds the activations of, and as many as keep a GPU busy."""


@dataclass(frozen=True)
class FixedModel:
    """A model w [d] that reads data."""

    kernel: Kernel
    model: Tensor

    def predictions(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted class and cross-entropy of every sample."""
        parameters = self._parameters()
        pieces = []
        for rows, batch in _batches(x, y):
            logits = self.kernel.logits(parameters, batch)[0]
            pieces.append((logits.argmax(-1), cross_entropy_values(logits, y[rows])))
        return torch.cat([predicted for predicted, _ in pieces]), torch.cat([losses for _, losses in pieces])

    def outer(self, x: Tensor, y: Tensor, coefficients: Tensor, outer: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w), and its gradient in w."""
        parameters = self._parameters()
        gradient = [torch.zeros_like(p) for p in parameters]
        total = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
        for rows, batch in _batches(x, y):
            logits, pullback = self.kernel.linearize(parameters, batch)
            values, slope = outer.values(logits[0], y[rows])
            total += values @ coefficients[rows]
            pullback((slope * coefficients[rows, None])[None], gradient)
        return total, flatten(gradient)[0]

    def _parameters(self) -> Parameters:
        """Copies: a module may hold its weights within bounds when it is run, and w must not change by that."""
        return unflatten(self.model[None], self.kernel.shapes + self.kernel.statistics)


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[slice, Batch]]:
    at_once = ROWS_AT_ONCE[x.device.type]
    for begin in range(0, len(y), at_once):
        rows = slice(begin, min(begin + at_once, len(y)))
        yield rows, Batch(x[rows][None], y[rows][None], [rows.stop - rows.start])
