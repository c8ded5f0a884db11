"""Passes over data with one model that does not move: the last layer, absent clients, accuracies, the test.

All minibatches meet the same model, so a sample's terms collapse into one coefficient and every client's
data is read once, whatever its number of epochs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedunfold.core.task import OuterLoss, cross_entropy_values
from fedunfold.engines.simulation.kernels.base import Batch, Kernel, Parameters, flatten, unflatten

ROWS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
"""As many as a processor's cache holds the activations of, and as many as keep a GPU busy."""

NUMBERS_AT_ONCE = 2**28
"""Activations of a layer, of all models that read together."""


def outer_loss(
    kernel: Kernel, model: Tensor, x: Tensor, y: Tensor, coefficients: Tensor, outer: OuterLoss
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i ℓ^out_i(w) at a model w [d], and its gradient in w."""
    parameters = _parameters(kernel, model[None])
    gradient = [torch.zeros_like(p) for p in parameters]
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for rows, batch in _batches(x, y, ROWS_AT_ONCE[x.device.type]):
        logits, pullback = kernel.local_vjp(parameters, batch)
        values, slope = outer.values(logits[0], y[rows])
        total += values @ coefficients[rows]
        pullback((slope * coefficients[rows, None])[None], gradient)
    return total, flatten(gradient)[0]


def predictions(kernel: Kernel, models: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted class and cross-entropy of every sample, [R, N], for models [R, d] that read the samples together."""
    parameters = _parameters(kernel, models)
    pieces = []
    widest = max(shape[0] for shape in kernel.shapes)
    at_once = max(1, min(ROWS_AT_ONCE[x.device.type], NUMBERS_AT_ONCE // (len(models) * widest)))
    for _, batch in _batches(x, y, at_once, len(models)):
        logits = kernel.logits(parameters, batch)
        pieces.append((logits.argmax(-1), cross_entropy_values(logits, batch.y)))
    return torch.cat([predicted for predicted, _ in pieces], 1), torch.cat([losses for _, losses in pieces], 1)


def _parameters(kernel: Kernel, models: Tensor) -> Parameters:
    """Copies: a module may hold its weights within bounds when it is run, and w must not change by that."""
    return unflatten(models, kernel.shapes + kernel.statistics)


def _batches(x: Tensor, y: Tensor, at_once: int, models: int = 1) -> Iterator[tuple[slice, Batch]]:
    for begin in range(0, len(y), at_once):
        rows = slice(begin, min(begin + at_once, len(y)))
        shared = x[rows].expand(models, *x[rows].shape), y[rows].expand(models, -1)
        yield rows, Batch(*shared, [rows.stop - rows.start] * models)
