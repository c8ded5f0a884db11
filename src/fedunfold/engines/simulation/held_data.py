"""All clients' rows and the test set, read by models that do not move: absent clients, the last layer, accuracies."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.federation import Evaluation, TrainRequest
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.drawing import BatchSampler
from fedunfold.engines.simulation.round import Round
from fedunfold.engines.simulation.samples import Evaluator
from fedunfold.engines.simulation.schedule import upload


class ClientEvaluator:
    """`samples` are the clients' rows one after the other; the test set is held where and as precisely as they are."""

    def __init__(self, data: FederatedData, samples: Evaluator, drawing: BatchSampler) -> None:
        self._data, self._samples, self._drawing = data, samples, drawing
        self._sizes = np.array(data.sizes)

    def outer_at(self, round: Round, clients: np.ndarray) -> tuple[Tensor, Tensor]:
        """The outer loss of some clients at w^(t), and its gradient."""
        request, outer = round.request, round.request.outer
        if outer is None:
            raise InputError("the request names no outer loss.")
        rows = self._places(clients)
        factors = np.repeat(round.client_factors(outer)[clients], self._sizes[clients])
        y = self._samples.y
        weights = self._samples.tensor(self._drawing.coefficients(round.walks(clients)) * factors)
        class_weights = self.class_weights(request)
        if class_weights is not None:
            weights = weights * class_weights[y[upload(rows, y.device)]]
        return self._samples.outer(request.model, rows, weights, outer)

    def losses_at(self, round: Round, clients: np.ndarray, *, per_sample: bool) -> np.ndarray:
        """Per client, at w^(t): the mean loss over its samples, or the sum over its minibatches."""
        out = np.full(len(self._sizes), np.nan)
        if not len(clients):
            return out
        _, losses = self._samples.predictions(round.request.model, self._places(clients))
        sizes = self._sizes[clients]
        weights = np.repeat(1 / sizes, sizes) if per_sample else self._drawing.coefficients(round.walks(clients))
        owner = np.repeat(np.arange(len(clients)), sizes)
        out[clients] = np.bincount(owner, weights * losses.cpu().double().numpy(), len(clients))
        return out

    def accuracies(self, models: Tensor, clients: np.ndarray) -> list[float]:
        """Accuracy of a model for each client on its own training data."""
        accuracies = []
        for model, k in zip(models, clients, strict=True):
            predicted, _ = self._samples.predictions(model, self._places([k]))
            labels = self._samples.y[self._data.offsets[k] : self._data.offsets[k + 1]]
            accuracies.append(float((predicted == labels).double().mean()))
        return accuracies

    def test(self, models: Tensor) -> list[Evaluation]:
        """Models [R, d] on the test set."""
        y = self._test.y
        predicted, losses = self._test.predictions_together(models)
        right = losses.new_zeros(len(models), self._data.classes, dtype=torch.float64)
        right.index_add_(1, y, (predicted == y).double())
        found = torch.cat([right, losses.double().mean(1, keepdim=True)], 1).cpu()  # all that is waited for
        accuracies, per_class = found[:, :-1].sum(1) / len(y), found[:, :-1] / self._test_counts
        return list(map(Evaluation, accuracies.tolist(), found[:, -1].tolist(), per_class))

    def class_weights(self, request: TrainRequest) -> Tensor | None:
        """Those of the outer loss [C], the server's where it sends them."""
        if request.outer is None:
            return None
        weights = request.outer.class_weights(self._data.label_counts)
        if weights is not None and request.class_weights is not None:
            weights = request.class_weights
            if weights.shape != (self._data.classes,):
                raise InputError(f"there are {weights.numel()} class weights for {self._data.classes} classes.")
        return None if weights is None else weights.to(self._samples.x)

    @cached_property
    def _test(self) -> Evaluator:
        x, y = self._data.x_test.to(self._samples.x), self._data.y_test.to(self._samples.y)
        return replace(self._samples, x=x.contiguous(), y=y.contiguous())

    @cached_property
    def _test_counts(self) -> Tensor:
        return torch.bincount(self._data.y_test, minlength=self._data.classes)

    def _places(self, clients: Iterable[int]) -> np.ndarray:
        """Where the rows of these clients are."""
        offsets = self._data.offsets
        return np.concatenate([np.arange(offsets[k], offsets[k + 1], dtype=np.int32) for k in clients])
