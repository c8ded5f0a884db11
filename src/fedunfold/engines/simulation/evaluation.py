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
from fedunfold.core.messages import TrainRequest
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import OuterLoss
from fedunfold.core.task import PrimaryMetric, Task
from fedunfold.core.threading import threads_for
from fedunfold.data.arrays import Inputs, map_inputs
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.backend import Backend
from fedunfold.engines.simulation.batching import (
    BatchSampler,
    MemorySamples,
    Samples,
    sample_coefficients,
    samples_of,
    upload,
)
from fedunfold.engines.simulation.kernels.base import Batch, Kernel, flatten, unflatten
from fedunfold.engines.simulation.local_training import RoundContext
from fedunfold.tasks.classification import Classification
from fedunfold.tasks.cross_entropy import cross_entropy_values

ROWS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
"""As many as a processor's cache holds the activations of, and as many as keep a GPU busy."""
NUMBERS_AT_ONCE = 2**28
"""Activations of a layer, of all models that read together."""


def outer_loss(
    kernel: Kernel, model: Tensor, batches: Iterable[tuple[Tensor, Batch]], outer: OuterLoss
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i ℓ^out_i(w) at a model w [d] over minibatches with their coefficients c, and its gradient in w."""
    parameters = _parameters(kernel, model[None])
    gradient = [torch.zeros_like(p) for p in parameters]
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for coefficients, batch in batches:
        outputs, pullback = kernel.local_vjp(parameters, batch)
        values, slopes = outer.values(kernel.task, outputs, batch.y, batch.counts)
        total += values[0] @ coefficients
        pullback(slopes(coefficients[None]), gradient)
    return total, flatten(gradient)[0]


def outputs_of(
    kernel: Kernel, models: Tensor, samples: Samples, rows: np.ndarray | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs [R, n, …] and targets [n, …] of some rows after the other, for models [R, d] that read them together."""
    parameters = _parameters(kernel, models)
    widest = max((shape[0] for shape in kernel.layout.shapes if shape), default=1)
    at_once = max(1, min(ROWS_AT_ONCE[models.device.type], NUMBERS_AT_ONCE // (len(models) * widest)))
    for _, x, y in samples.pieces(rows, at_once):
        yield kernel.outputs(parameters, _batch(x, y, len(models))), y


def predictions(
    kernel: Kernel, models: Tensor, samples: Samples, rows: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Predicted class and cross-entropy of every sample, [R, N], for models [R, d]."""
    pieces = [
        (logits.argmax(-1), cross_entropy_values(logits, labels.expand(len(models), -1)))
        for logits, labels in outputs_of(kernel, models, samples, rows)
    ]
    return torch.cat([predicted for predicted, _ in pieces], 1), torch.cat([losses for _, losses in pieces], 1)


def statistics(
    kernel: Kernel, model: Tensor, samples: Samples, rows: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """The task's statistics [M] and the losses of rows [N] at a model w [d]; rows that interact are one minibatch."""
    task = kernel.task
    pieces: Iterable[tuple[Tensor, Tensor]]
    pieces = ((out[0], y) for out, y in outputs_of(kernel, model[None], samples, rows))
    if task.rows_interact:
        outputs, targets = zip(*pieces, strict=True)
        pieces = [(torch.cat(outputs), torch.cat(targets))]
    found = [(task.statistics(*piece), task.losses(*piece)) for piece in pieces]
    return torch.stack([sums for sums, _ in found]).sum(0), torch.cat([losses for _, losses in found])


def _parameters(kernel: Kernel, models: Tensor) -> list[Tensor]:
    """Copies: a module may hold its weights within bounds when it is run, and w must not change by that."""
    return unflatten(models, kernel.layout.shapes + kernel.layout.buffer_shapes)


def _batch(x: Inputs, y: Tensor, models: int = 1) -> Batch:
    """The same rows for every model."""
    return Batch(map_inputs(lambda t: t.expand(models, *t.shape), x), y.expand(models, *y.shape), [len(y)] * models)


class Evaluator:
    """Samples read by models with fixed parameters. `rows` are numbers of samples, ascending."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self._backend.samples)

    def outer(self, model: Tensor, rows: np.ndarray, coefficients: Tensor, loss: OuterLoss) -> tuple[Tensor, Tensor]:
        """Σ_i c_i ℓ^out_i(w) over some rows, and its gradient in w; rows that interact are one minibatch."""
        backend = self._backend
        if loss.is_training_loss and (compiled := backend.cpu) is not None:
            return compiled.outer(model, rows, coefficients)
        at_once = len(rows) if backend.kernel.task.rows_interact else ROWS_AT_ONCE[backend.device.type]
        pieces = backend.samples.pieces(rows, at_once)
        batches = ((coefficients[piece], _batch(x, y)) for piece, x, y in pieces)
        with threads_for(len(rows) * len(model), backend.threads):
            return outer_loss(backend.kernel, model, batches, loss)

    def predictions(self, model: Tensor, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Predicted class argmax_c z_ic and cross-entropy log Σ_c e^{z_ic} − z_{i y_i} of some rows, or of all."""
        backend = self._backend
        # Compiled code leaves out products with 0, also those that are not 0: with a weight that is not finite.
        if (compiled := backend.cpu) is not None and _is_finite(model):
            return compiled.predict(model, np.arange(len(backend.samples), dtype=np.int32) if rows is None else rows)
        with threads_for(self._count(rows) * len(model), backend.threads):
            predicted, losses = predictions(backend.kernel, model[None], backend.samples, rows)
            return predicted[0], losses[0]

    def statistics(self, model: Tensor, rows: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """The task's statistics and the losses of some rows, or of all."""
        backend, task = self._backend, self._backend.kernel.task
        if type(task) is Classification and backend.cpu is not None:
            predicted, losses = self.predictions(model, rows)
            y = backend.samples.y
            return task.class_counts(predicted, y if rows is None else y[torch.from_numpy(rows)]), losses
        with threads_for(self._count(rows) * len(model), backend.threads):
            return statistics(backend.kernel, model, backend.samples, rows)

    def all_statistics(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics [R, M] and mean losses [R] of all rows, for models [R, d]; a GPU has them read together."""
        backend, task = self._backend, self._backend.kernel.task
        if backend.device.type != "cpu" and type(task) is Classification and backend.in_memory is not None:
            y = backend.samples.y
            predicted, losses = predictions(backend.kernel, models, backend.samples)
            right = losses.new_zeros(len(models), task.classes, dtype=torch.float64)
            right.index_add_(1, y, (predicted == y).double())
            counts = torch.bincount(y, minlength=task.classes).double().expand(len(models), -1)
            return torch.cat([right, counts], 1), losses.double().mean(1)
        found = [self.statistics(model) for model in models]
        return torch.stack([sums for sums, _ in found]), torch.stack([losses.double().mean() for _, losses in found])

    def _count(self, rows: np.ndarray | None) -> int:
        return self.num_rows if rows is None else len(rows)


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
        task, backend = self._backend.kernel.task, self._backend
        factors = context.client_factors(outer)[clients]
        if task.rows_interact:
            return outer_loss(backend.kernel, request.model, self._minibatches(context, clients, factors), outer)
        rows = self._rows_of(clients)
        coefficients = self._coefficients(context, clients) * np.repeat(factors, self._sampler.sizes[clients])
        weights = upload(coefficients, backend.device, backend.dtype)
        class_weights = self.class_weights(request)
        if class_weights is not None:
            weights = weights * class_weights[task.groups(self._targets(rows))]
        return self._rows.outer(request.model, rows, weights, outer)

    def _targets(self, rows: np.ndarray) -> Tensor:
        """Those of some rows."""
        samples = self._backend.samples
        if isinstance(samples, MemorySamples):
            return samples.y[upload(rows, samples.y.device)]
        return torch.cat([y for _, _, y in samples.pieces(rows, ROWS_AT_ONCE["cpu"])])

    def _minibatches(
        self, context: RoundContext, clients: np.ndarray, factors: np.ndarray
    ) -> Iterator[tuple[Tensor, Batch]]:
        """All minibatches of some clients in a round, one after the other, with factor/|b| for every row."""
        backend = self._backend
        plan = self._sampler.batches(context.slices_of(clients))
        for step, slots in enumerate(plan.active):
            for slot in range(slots):
                count = int(plan.counts[step, slot])
                x, y = backend.samples.minibatches(plan.rows[step, slot : slot + 1, :count], [count])
                means = plan.means[step, slot, :count] * float(factors[plan.order[slot]])
                yield means, Batch(x, y, [count])

    def losses_at(self, context: RoundContext, clients: np.ndarray, *, per_sample: bool) -> np.ndarray:
        """Per client, at w^(t): the mean loss over its samples, or the sum over its minibatches; NaN for the others."""
        out = np.full(len(self._sampler.sizes), np.nan)
        if not len(clients):
            return out
        model, kernel, request = context.request.model, self._backend.kernel, context.request
        if request.own is not None:
            for own, k in zip(context.own_models(clients), clients, strict=True):
                alone = replace(context, request=replace(request, model=own, own=None))
                out[k] = self.losses_at(alone, np.array([k]), per_sample=per_sample)[k]
            return out
        if kernel.task.rows_interact and not per_sample:
            parameters = _parameters(kernel, model[None])
            for k in clients:
                batches = self._minibatches(context, np.array([k]), np.ones(1))
                values = (kernel.task.losses(kernel.outputs(parameters, b)[0], b.y[0]) @ means for means, b in batches)
                out[k] = sum(map(float, values))
            return out
        if kernel.task.rows_interact:
            losses = torch.cat([self._rows.statistics(model, self._rows_of([k]))[1] for k in clients])
        else:
            losses = self._rows.statistics(model, self._rows_of(clients))[1]
        sizes = self._sampler.sizes[clients]
        weights = np.repeat(1 / sizes, sizes) if per_sample else self._coefficients(context, clients)
        owner = np.repeat(np.arange(len(clients)), sizes)
        out[clients] = np.bincount(owner, weights * losses.cpu().double().numpy(), len(clients))
        return out

    def scores(self, models: Iterable[Tensor], clients: np.ndarray) -> Tensor:
        """The primary metric of a model for each client on its own training data, [P]."""
        task, found = self._backend.kernel.task, []
        for model, k in zip(models, clients, strict=True):
            sums, _ = self._rows.statistics(model, self._rows_of([k]))
            found.append(task.metrics(sums.cpu())[task.primary])
        return torch.tensor(found, dtype=torch.float64)

    def test(self, models: Tensor) -> list[Evaluation]:
        """Models [R, d] on the test set."""
        return [evaluation_of(self._backend.kernel.task, *found) for found in self.test_statistics(models)]

    def test_statistics(self, models: Tensor) -> list[tuple[Tensor, float]]:
        """The task's statistics on the test set [M] and the mean loss, for each of some models [R, d]."""
        sums, losses = self._test.all_statistics(models)
        found = torch.cat([sums, losses[:, None]], 1).cpu()  # all that is waited for
        return [(row[:-1], float(row[-1])) for row in found]

    def class_weights(self, request: TrainRequest) -> Tensor | None:
        """Those of the outer loss [C], the server's where it sends them."""
        groups = self._backend.kernel.task.num_groups
        if request.outer is None or groups == 1:
            return None
        weights, broadcast = request.outer.class_weights(self._data.label_counts), request.broadcast
        if weights is not None and broadcast is not None and broadcast.class_weights is not None:
            weights = broadcast.class_weights
            if weights.shape != (groups,):
                raise InputError(f"there are {weights.numel()} class weights for {groups} classes.")
        return None if weights is None else weights.to(self._backend.device, self._backend.dtype)

    @cached_property
    def _test(self) -> Evaluator:
        backend = self._backend
        samples = samples_of(self._data.test_inputs, self._data.y_test, backend.device, backend.dtype)
        return Evaluator(replace(backend, samples=samples))

    def _coefficients(self, context: RoundContext, clients: np.ndarray) -> np.ndarray:
        """How much each of their samples counts where all minibatches meet the same model."""
        return sample_coefficients(context.slices_of(clients), self._sampler.batch_size)

    def _rows_of(self, clients: Iterable[int]) -> np.ndarray:
        offsets = self._data.offsets
        return np.concatenate([np.arange(offsets[k], offsets[k + 1], dtype=np.int32) for k in clients])


def evaluation_of(task: Task, statistics: Tensor, loss: float) -> Evaluation:
    """A test from the task's statistics and the mean loss."""
    metrics = task.metrics(statistics)
    return Evaluation(metrics[task.primary], loss, task.group_scores(statistics), metrics, PrimaryMetric.of(task))


def _is_finite(model: Tensor) -> bool:
    """0 · w is NaN where w is not finite: a tenth of the time that `torch.isfinite` takes."""
    return float((model * 0).sum()) == 0
