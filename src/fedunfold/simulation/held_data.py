"""All clients' rows and the test set, read by models that do not move: absent clients, the last layer, accuracies."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.data.federated import FederatedData
from fedunfold.errors import InputError
from fedunfold.federation import Evaluation, RoundRequest
from fedunfold.simulation.fixed_model import FixedModel
from fedunfold.simulation.kernel import Kernel
from fedunfold.simulation.round import Round
from fedunfold.simulation.schedule import sample_coefficients, upload
from fedunfold.simulation.walks import Walks
from fedunfold.threads import threads_for


class HeldData:
    """Data on the device and in the precision of `x` and `y`, which are the clients' rows one after the other."""

    def __init__(
        self,
        data: FederatedData,
        x: Tensor,
        y: Tensor,
        kernel: Kernel,
        walks: Walks,
        batch_size: int,
        threads: int,
    ) -> None:
        self._data, self._x, self._y, self._kernel, self._walks = data, x, y, kernel, walks
        self._batch_size, self._threads = batch_size, threads
        self._sizes = np.array(data.sizes)

    def outer_at(self, round: Round, clients: np.ndarray) -> tuple[Tensor, Tensor]:
        """The outer loss of some clients at w^(t), and its gradient."""
        request, outer = round.request, round.request.outer
        if outer is None:
            raise InputError("the request names no outer loss.")
        rows = self._places(clients)
        factors = np.repeat(round.client_factors(outer)[clients], self._sizes[clients])
        weights = upload(self._minibatch_coefficients(round, clients) * factors, self._x.device, self._x.dtype)
        class_weights = self.class_weights(request)
        if class_weights is not None:
            weights = weights * class_weights[self._y[upload(rows, self._x.device)]]
        return self._walks.outer_at(request.model, rows, weights, outer)

    def losses_at(self, round: Round, clients: np.ndarray, *, per_sample: bool) -> np.ndarray:
        """Per client, at w^(t): the mean loss over its samples, or the sum over its minibatches."""
        out = np.full(len(self._sizes), np.nan)
        if not len(clients):
            return out
        rows = self._rows(clients)
        _, losses = self._predictions(round.request.model, self._x[rows], self._y[rows])
        sizes = self._sizes[clients]
        weights = np.repeat(1 / sizes, sizes) if per_sample else self._minibatch_coefficients(round, clients)
        owner = np.repeat(np.arange(len(clients)), sizes)
        out[clients] = np.bincount(owner, weights * losses.cpu().double().numpy(), len(clients))
        return out

    def accuracies(self, models: Tensor, clients: np.ndarray) -> list[float]:
        """Accuracy of a model for each client on its own training data."""
        accuracies = []
        for model, k in zip(models, clients, strict=True):
            rows = slice(self._data.offsets[k], self._data.offsets[k + 1])
            predicted, _ = self._predictions(model, self._x[rows], self._y[rows])
            accuracies.append(float((predicted == self._y[rows]).double().mean()))
        return accuracies

    def test(self, model: Tensor) -> Evaluation:
        """A model on the test set."""
        x, y = self._test
        predicted, losses = self._predictions(model, x, y)
        right = losses.new_zeros(self._data.classes, dtype=torch.float64).index_add_(0, y, (predicted == y).double())
        *per_class, loss = torch.cat([right, losses.double().mean()[None]]).tolist()  # all that is waited for
        found = torch.tensor(per_class, dtype=torch.float64)
        return Evaluation(float(found.sum() / len(y)), loss, found / self._test_counts)

    def class_weights(self, request: RoundRequest) -> Tensor | None:
        """Those of the outer loss [C], the server's where it sends them."""
        if request.outer is None:
            return None
        weights = request.outer.class_weights(self._data.label_counts)
        if weights is not None and request.class_weights is not None:
            weights = request.class_weights
            if weights.shape != (self._data.classes,):
                raise InputError(f"there are {weights.numel()} class weights for {self._data.classes} classes.")
        return None if weights is None else weights.to(self._x)

    def _predictions(self, model: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted class and cross-entropy of every row."""
        with threads_for(len(y) * len(model), self._threads):
            return FixedModel(self._kernel, model).predictions(x, y)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        return self._data.x_test.to(self._x), self._data.y_test.to(self._y.device)

    @cached_property
    def _test_counts(self) -> Tensor:
        return torch.bincount(self._data.y_test, minlength=self._data.classes)

    def _rows(self, clients: np.ndarray) -> Tensor | slice:
        """Rows of these clients' data; a slice, which copies nothing, where they are all clients."""
        if len(clients) == len(self._sizes):
            return slice(None)
        return upload(self._places(clients), self._x.device)

    def _places(self, clients: np.ndarray) -> np.ndarray:
        """Where the rows of these clients are."""
        offsets = self._data.offsets
        return np.concatenate([np.arange(offsets[k], offsets[k + 1], dtype=np.int32) for k in clients])

    def _minibatch_coefficients(self, round: Round, clients: np.ndarray) -> np.ndarray:
        return np.concatenate([sample_coefficients(*walk, self._batch_size) for walk in round.walks(clients)])
