"""Passes over data with fixed parameters: the final evaluation, absent clients, accuracies, the test.

All minibatches meet the same model, so a sample's terms collapse into one coefficient and every client's data is read
once, whatever its number of epochs. Compiled code reads them where there is some, else torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import Evaluation, TrainRequest
from fedunfold.core.parts import OuterLoss
from fedunfold.core.task import cross_entropy_values
from fedunfold.core.threading import threads_for
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.backend import Backend
from fedunfold.engines.simulation.batching import BatchSampler, sample_coefficients, upload
from fedunfold.engines.simulation.kernels.base import Batch, Kernel, flatten, unflatten
from fedunfold.engines.simulation.local_training import RoundContext

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
    widest = max(shape[0] for shape in kernel.layout.shapes)
    at_once = max(1, min(ROWS_AT_ONCE[x.device.type], NUMBERS_AT_ONCE // (len(models) * widest)))
    for _, batch in _batches(x, y, at_once, len(models)):
        logits = kernel.logits(parameters, batch)
        pieces.append((logits.argmax(-1), cross_entropy_values(logits, batch.y)))
    return torch.cat([predicted for predicted, _ in pieces], 1), torch.cat([losses for _, losses in pieces], 1)


def _parameters(kernel: Kernel, models: Tensor) -> list[Tensor]:
    """Copies: a module may hold its weights within bounds when it is run, and w must not change by that."""
    return unflatten(models, kernel.layout.shapes + kernel.layout.buffer_shapes)


def _batches(x: Tensor, y: Tensor, at_once: int, models: int = 1) -> Iterator[tuple[slice, Batch]]:
    for begin in range(0, len(y), at_once):
        rows = slice(begin, min(begin + at_once, len(y)))
        shared = x[rows].expand(models, *x[rows].shape), y[rows].expand(models, -1)
        yield rows, Batch(*shared, [rows.stop - rows.start] * models)


class Evaluator:
    """Samples read by models with fixed parameters. `rows` are numbers of samples, ascending."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.y = backend.y

    def outer(self, model: Tensor, rows: np.ndarray, coefficients: Tensor, loss: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w) over some rows, and its gradient in w."""
        backend = self._backend
        if loss.is_cross_entropy and (compiled := backend.cpu) is not None:
            return compiled.outer(model, rows, coefficients)
        some = self._index(rows)
        with threads_for(len(rows) * len(model), backend.threads):
            return outer_loss(backend.kernel, model, backend.x[some], self.y[some], coefficients, loss)

    def predictions(self, model: Tensor, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Predicted class argmax_c z_ic and cross-entropy log Σ_c e^{z_ic} − z_{i y_i} of some rows, or of all."""
        backend = self._backend
        rows = np.arange(len(self.y), dtype=np.int32) if rows is None else rows
        # Compiled code leaves out products with 0, also those that are not 0: with a weight that is not finite.
        if (compiled := backend.cpu) is not None and _is_finite(model):
            return compiled.predict(model, rows)
        some = self._index(rows)
        with threads_for(len(rows) * len(model), backend.threads):
            predicted, losses = predictions(backend.kernel, model[None], backend.x[some], self.y[some])
            return predicted[0], losses[0]

    def all_predictions(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """The same of all rows, [R, N], for models [R, d]; a GPU has them read together."""
        if self.y.device.type != "cpu":
            return predictions(self._backend.kernel, models, self._backend.x, self.y)
        predicted, losses = zip(*(self.predictions(model) for model in models), strict=True)
        return torch.stack(predicted), torch.stack(losses)

    def _index(self, rows: np.ndarray) -> Tensor | slice:
        """A slice, which copies nothing, where no row between them is left out."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return upload(rows, self.y.device)


class ClientEvaluator:
    """All clients' rows and the test set.

    Args:
        data: Of all clients.
        backend: Their rows where they are computed on.
        sampler: Who has which rows.
    """

    def __init__(self, data: FederatedData, backend: Backend, sampler: BatchSampler) -> None:
        self._data, self._backend, self._sampler = data, backend, sampler
        self._rows = Evaluator(backend)

    def outer_at(self, context: RoundContext, clients: np.ndarray) -> tuple[Tensor, Tensor]:
        """The outer loss of some clients at w^(t), and its gradient."""
        request, outer = context.request, context.request.outer
        if outer is None:
            raise InputError("the request names no outer loss.")
        rows = self._rows_of(clients)
        factors = np.repeat(context.client_factors(outer)[clients], self._sampler.sizes[clients])
        coefficients = self._coefficients(context, clients) * factors
        x, y = self._backend.x, self._backend.y
        weights = upload(coefficients, x.device, x.dtype)
        class_weights = self.class_weights(request)
        if class_weights is not None:
            weights = weights * class_weights[y[upload(rows, y.device)]]
        return self._rows.outer(request.model, rows, weights, outer)

    def losses_at(self, context: RoundContext, clients: np.ndarray, *, per_sample: bool) -> np.ndarray:
        """Per client, at w^(t): the mean loss over its samples, or the sum over its minibatches; NaN for the others."""
        out = np.full(len(self._sampler.sizes), np.nan)
        if not len(clients):
            return out
        _, losses = self._rows.predictions(context.request.model, self._rows_of(clients))
        sizes = self._sampler.sizes[clients]
        weights = np.repeat(1 / sizes, sizes) if per_sample else self._coefficients(context, clients)
        owner = np.repeat(np.arange(len(clients)), sizes)
        out[clients] = np.bincount(owner, weights * losses.cpu().double().numpy(), len(clients))
        return out

    def accuracies(self, models: Iterable[Tensor], clients: np.ndarray) -> Tensor:
        """Accuracy of a model for each client on its own training data, [P]."""
        accuracies = []
        for model, k in zip(models, clients, strict=True):
            predicted, _ = self._rows.predictions(model, self._rows_of([k]))
            labels = self._rows.y[self._data.offsets[k] : self._data.offsets[k + 1]]
            accuracies.append(float((predicted == labels).double().mean()))
        return torch.tensor(accuracies, dtype=torch.float64)

    def test(self, models: Tensor) -> list[Evaluation]:
        """Models [R, d] on the test set."""
        y = self._test.y
        predicted, losses = self._test.all_predictions(models)
        right = losses.new_zeros(len(models), self._data.classes, dtype=torch.float64)
        right.index_add_(1, y, (predicted == y).double())
        found = torch.cat([right, losses.double().mean(1, keepdim=True)], 1).cpu()  # all that is waited for
        accuracies, per_class = (
            found[:, :-1].sum(1) / len(y),
            found[:, :-1] / torch.bincount(self._data.y_test, minlength=self._data.classes),
        )
        return list(map(Evaluation, accuracies.tolist(), found[:, -1].tolist(), per_class))

    def class_weights(self, request: TrainRequest) -> Tensor | None:
        """Those of the outer loss [C], the server's where it sends them."""
        if request.outer is None:
            return None
        weights, broadcast = request.outer.class_weights(self._data.label_counts), request.broadcast
        if weights is not None and broadcast is not None and broadcast.class_weights is not None:
            weights = broadcast.class_weights
            if weights.shape != (self._data.classes,):
                raise InputError(f"there are {weights.numel()} class weights for {self._data.classes} classes.")
        return None if weights is None else weights.to(self._backend.x)

    @cached_property
    def _test(self) -> Evaluator:
        x, y = self._data.x_test.to(self._backend.x), self._data.y_test.to(self._backend.y)
        return Evaluator(replace(self._backend, x=x.contiguous(), y=y.contiguous()))

    def _coefficients(self, context: RoundContext, clients: np.ndarray) -> np.ndarray:
        """How much each of their samples counts where all minibatches meet the same model."""
        return sample_coefficients(context.slices_of(clients), self._sampler.batch_size)

    def _rows_of(self, clients: Iterable[int]) -> np.ndarray:
        offsets = self._data.offsets
        return np.concatenate([np.arange(offsets[k], offsets[k + 1], dtype=np.int32) for k in clients])


def _is_finite(model: Tensor) -> bool:
    """0 · w is NaN where w is not finite: a tenth of the time that `torch.isfinite` takes."""
    return float((model * 0).sum()) == 0
