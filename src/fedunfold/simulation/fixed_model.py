"""Passes over data with one model that does not move: the last layer, absent clients, accuracies, the test.

All minibatches meet the same model, so a sample's terms collapse into one coefficient and every client's
data is read once, whatever its number of epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.losses import OuterLoss, cross_entropy
from fedunfold.simulation.kernel import Batch, Kernel, Pullback, flatten, unflatten

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class FixedModel:
    """A model w [d] that reads data."""

    kernel: Kernel
    model: Tensor

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of every sample."""
        pieces = [cross_entropy(z, y[rows])[0] for rows, z, _ in self._read(x, y)]
        return torch.cat(pieces)

    def predictions(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted class and cross-entropy of every sample."""
        pieces = [(z.argmax(-1), cross_entropy(z, y[rows])[0]) for rows, z, _ in self._read(x, y)]
        return torch.cat([p for p, _ in pieces]), torch.cat([loss for _, loss in pieces])

    def outer(self, x: Tensor, y: Tensor, coefficients: Tensor, outer: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w), and its gradient in w."""
        gradient = unflatten(torch.zeros_like(self.model)[None], self.kernel.shapes)
        total = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
        for rows, logits, pullback in self._read(x, y):
            values, slope = outer.values(logits, y[rows])
            total += values @ coefficients[rows]
            pullback((slope * coefficients[rows, None])[None], gradient)
        return total, flatten(gradient)[0]

    def _read(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor, Pullback]]:
        parameters = unflatten(self.model[None], self.kernel.shapes)
        for begin in range(0, len(y), ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, len(y)))
            batch = Batch(x[rows][None], y[rows][None], [rows.stop - rows.start])
            logits, pullback = self.kernel.linearize(parameters, batch)
            yield rows, logits[0], pullback
