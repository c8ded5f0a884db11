"""The `Federation` contract in one process."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedunfold import randomness
from fedunfold.data.federated import FederatedData
from fedunfold.environments import Environment
from fedunfold.errors import DivergenceError, InputError
from fedunfold.federation import ClientInfo, Evaluation, OuterReport, RoundReport, RoundRequest
from fedunfold.losses import OuterLoss
from fedunfold.models import model_factory
from fedunfold.simulation.any_module import AnyModule
from fedunfold.simulation.fixed_model import FixedModel
from fedunfold.simulation.kernel import Kernel, check_trainable, flatten, unflatten
from fedunfold.simulation.linear_stack import LinearStack
from fedunfold.simulation.schedule import Draw, Share, plan, sample_coefficients
from fedunfold.simulation.walk import OuterTerms, Tally, Walk
from fedunfold.updates import LocalUpdate

ModelFactory = Callable[[], nn.Module]


class SimulatedFederation:
    """All clients of an environment in this process, advancing together in batched steps.

    `model` builds a fresh classifier ([B, …] → logits [B, C]); by default the environment's own. Stacks of
    linear layers take the batched path, anything else runs as it is, lane by lane, with the same result.
    `memory_budget` bounds the bytes of iterates that the exact adjoint keeps of one round.
    """

    def __init__(
        self,
        environment: Environment,
        data: FederatedData | None = None,
        *,
        model: ModelFactory | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        memory_budget: int = 768 * 2**20,
    ) -> None:
        self.environment = environment
        self._data = data = environment.load() if data is None else data
        self._device, self._dtype = torch.device(device), dtype
        self._memory_budget = memory_budget
        self._x, self._y = data.x.to(self._device, dtype), data.y.to(self._device)
        self._test = data.x_test.to(self._device, dtype), data.y_test.to(self._device)
        self._sizes = np.array(data.sizes, dtype=np.float64)
        if isinstance(model, nn.Module):
            raise InputError("pass a function that builds the model, such as `lambda: Net()`, not a built one.")
        self._build = model or model_factory(environment.model, tuple(data.x.shape[1:]), data.classes)
        self._kernel = self._choose_kernel()
        self.clients: Sequence[ClientInfo] = tuple(
            ClientInfo(key, size, tuple(counts.tolist()))
            for key, size, counts in zip(data.keys, data.sizes, data.label_counts, strict=True)
        )

    @property
    def lr(self) -> float:
        return self.environment.lr

    @property
    def kernel(self) -> str:
        """Which path the model takes: `LinearStack` or `AnyModule`."""
        return type(self._kernel).__name__

    def initial_model(self, run: str) -> Tensor:
        module = self._seeded_module(run)
        flat = torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])
        return flat.to(self._device, self._dtype)

    def train(self, request: RoundRequest) -> RoundReport:
        present = self._draw(request).present(
            self._data.keys,
            [client.reliability for client in self.environment.clients],
            self.environment.sampled,
        )
        steps = [share.steps(self.environment.batch_size) for share in self._shares(request.round)]
        loss = np.full(len(present), np.nan)
        outer_loss = 0.0
        outer_gradient: Tensor | None = None
        updates = gradients = self._x.new_empty(0, len(request.model))
        accuracy = np.full(len(present), np.nan)

        there = np.flatnonzero(present)
        if len(there):
            walk, inside, after = self._walk(request, present)
            parameters = self._start(request.model, len(there))
            tally = self._tally(request, len(there))
            walk.forward_(parameters, tally)
            in_client_order = torch.tensor(np.argsort(walk.schedule.order), device=self._device)
            raw = (flatten(parameters) - request.model)[in_client_order]
            self._refuse_divergence(raw, tally.loss[in_client_order], request.round, there)
            updates = raw * self._column(after[there])
            loss[there] = tally.loss[in_client_order].cpu().double().numpy()
            if "gradients" in request.needs:
                gradients = self._gradient_sums(tally, raw, inside[there], in_client_order)
            if "accuracy" in request.needs:
                accuracy[there] = self._training_accuracies(request.model + updates, there)
            if walk.outer is not None:
                outer_loss += float(tally.outer_loss.double().sum())
                if request.path_gradient:
                    outer_gradient = self._path_gradient(walk.outer.loss, tally, raw, inside, there, request)

        away = np.flatnonzero(~present) if request.absent_loss == "evaluate" else np.empty(0, dtype=int)
        if len(away):
            if "loss" in request.needs:
                loss[away] = self._losses_at(request, away, per_sample=False)[away]
            if request.outer is not None and not request.outer.only_last_layer:
                report = self._outer_at(request, away)
                outer_loss += report.loss
                outer_gradient = report.gradient if outer_gradient is None else outer_gradient + report.gradient

        start_loss = None
        if "start_loss" in request.needs:
            known = np.union1d(there, away)
            start_loss = torch.from_numpy(self._losses_at(request, known, per_sample=True))
        return RoundReport(
            round=request.round,
            keys=self._data.keys,
            sizes=torch.from_numpy(self._sizes),
            present=torch.from_numpy(present),
            steps=torch.from_numpy(np.where(present, steps, 0)),
            updates=updates,
            loss=torch.from_numpy(loss) if "loss" in request.needs else None,
            start_loss=start_loss,
            accuracy=torch.from_numpy(accuracy) if "accuracy" in request.needs else None,
            gradients=gradients if "gradients" in request.needs else None,
            outer_loss=outer_loss,
            outer_gradient=outer_gradient,
        )

    def backprop(self, request: RoundRequest, present: Tensor, adjoints: Tensor) -> Tensor:
        there = present.numpy()
        walk, _, after = self._walk(request, there)
        lanes = torch.tensor(walk.schedule.order, device=self._device)
        arriving = (adjoints * self._column(after[there]))[lanes]
        start = self._start(request.model, len(lanes))
        leaving = walk.backward(start, unflatten(arriving, self._kernel.shapes), self._memory_budget)
        return (flatten(leaving) - arriving).sum(0)

    def outer(self, request: RoundRequest) -> OuterReport:
        return self._outer_at(request, np.arange(len(self.clients)))

    def evaluate(self, model: Tensor) -> Evaluation:
        x, y = self._test
        predicted, losses = FixedModel(self._kernel, model).predictions(x, y)
        classes = self._data.classes
        right = torch.bincount(y[predicted == y], minlength=classes).double()
        per_class = right / torch.bincount(y, minlength=classes)
        return Evaluation(float(right.sum() / len(y)), float(losses.double().mean()), per_class.cpu())

    # --- one round -----------------------------------------------------------------------------------

    def _draw(self, request: RoundRequest) -> Draw:
        return Draw(self.environment.seed, request.run, request.round)

    def _shares(self, round: int) -> list[Share]:
        offsets = self._data.offsets
        return [
            Share(key, offsets[k], offsets[k + 1] - offsets[k], self.environment.epochs(k, round))
            for k, key in enumerate(self._data.keys)
        ]

    def _walk(self, request: RoundRequest, present: np.ndarray) -> tuple[Walk, np.ndarray, np.ndarray]:
        """The walk of the present clients, with c_k inside the loop and the factor after it, of all K."""
        shares = self._shares(request.round)
        batch_size = self.environment.batch_size
        steps = np.array([share.steps(batch_size) for share in shares])
        inside, after = request.update.scales(self._sizes, np.where(present, steps, 0), self.lr)
        there = np.flatnonzero(present)
        schedule = plan(self._draw(request), [shares[k] for k in there], batch_size, self._device, self._dtype)
        lanes = there[list(schedule.order)]
        outer = None
        if request.outer is not None:
            outer = OuterTerms(
                request.outer,
                self._tensor(self._client_factors(request.outer, request.round)[lanes]),
                self._class_weights(request.outer),
            )
        step_sizes = self._tensor(self.lr * inside[lanes])
        walk = Walk(self._kernel, self._x, self._y, schedule, step_sizes, request.update, outer)
        return walk, inside, after

    def _tally(self, request: RoundRequest, lanes: int) -> Tally:
        def sums() -> list[Tensor]:
            return [self._x.new_zeros(lanes, *shape) for shape in self._kernel.shapes]

        outer = request.outer
        own_gradient = (
            request.path_gradient
            and outer is not None
            and not outer.only_last_layer
            and not (outer.is_training_gradient and _carries_gradients(request.update))
        )
        return Tally(
            loss=self._x.new_zeros(lanes),
            outer_loss=self._x.new_zeros(lanes),
            gradients=sums() if "gradients" in request.needs and not _carries_gradients(request.update) else None,
            outer_gradients=sums() if own_gradient else None,
        )

    def _gradient_sums(self, tally: Tally, raw: Tensor, inside: np.ndarray, order: Tensor) -> Tensor:
        """Σ_τ ∇ℓ_b per present client, read off w^(t) − w_k = η c_k Σ ∇ℓ_b where that holds."""
        if tally.gradients is not None:
            return flatten(tally.gradients)[order]
        return raw / self._column(-self.lr * inside)

    def _path_gradient(
        self,
        outer: OuterLoss,
        tally: Tally,
        raw: Tensor,
        inside: np.ndarray,
        there: np.ndarray,
        request: RoundRequest,
    ) -> Tensor | None:
        """Σ_k Σ_τ ∇ℓ^out_b over the present clients."""
        if outer.only_last_layer:
            return None
        if tally.outer_gradients is not None:
            return flatten(tally.outer_gradients).sum(0)
        factors = self._client_factors(outer, request.round)[there] / (-self.lr * inside[there])
        return self._tensor(factors) @ raw

    # --- one model that does not move ------------------------------------------------------------------

    def _outer_at(self, request: RoundRequest, clients: np.ndarray) -> OuterReport:
        outer = request.outer
        if outer is None:
            raise InputError("the request names no outer loss.")
        rows = self._rows(clients)
        coefficients = self._minibatch_coefficients(request, clients)
        factors = self._client_factors(outer, request.round)
        coefficients *= np.repeat(factors[clients], self._sizes[clients].astype(int))
        weights = self._tensor(coefficients)
        class_weights = self._class_weights(outer)
        if class_weights is not None:
            weights = weights * class_weights[self._y[rows]]
        fixed = FixedModel(self._kernel, request.model)
        loss, gradient = fixed.outer(self._x[rows], self._y[rows], weights, outer)
        if not bool(torch.isfinite(loss)):
            raise DivergenceError(
                f"round {request.round}: the outer loss of the shared model is not finite; lower the "
                f"learning rate (now {self.lr})."
            )
        return OuterReport(float(loss), gradient)

    def _losses_at(self, request: RoundRequest, clients: np.ndarray, *, per_sample: bool) -> np.ndarray:
        """Per client, at w^(t): the mean loss over its samples, or the sum over its minibatches."""
        out = np.full(len(self.clients), np.nan)
        if not len(clients):
            return out
        rows = self._rows(clients)
        losses = FixedModel(self._kernel, request.model).losses(self._x[rows], self._y[rows])
        sizes = self._sizes[clients].astype(int)
        weights = np.repeat(1 / sizes, sizes) if per_sample else self._minibatch_coefficients(request, clients)
        owner = np.repeat(np.arange(len(clients)), sizes)
        out[clients] = np.bincount(owner, weights * losses.cpu().double().numpy(), len(clients))
        return out

    def _training_accuracies(self, models: Tensor, clients: np.ndarray) -> list[float]:
        """Accuracy of each client's own model on its own training data."""
        accuracies = []
        for model, k in zip(models, clients, strict=True):
            rows = slice(self._data.offsets[k], self._data.offsets[k + 1])
            predicted, _ = FixedModel(self._kernel, model).predictions(self._x[rows], self._y[rows])
            accuracies.append(float((predicted == self._y[rows]).double().mean()))
        return accuracies

    def _minibatch_coefficients(self, request: RoundRequest, clients: np.ndarray) -> np.ndarray:
        draw, shares = self._draw(request), self._shares(request.round)
        return np.concatenate([sample_coefficients(draw, shares[k], self.environment.batch_size) for k in clients])

    def _client_factors(self, outer: OuterLoss, round: int) -> np.ndarray:
        """1/E_k where the outer loss counts a client once, else 1."""
        epochs = [self.environment.epochs(k, round) for k in range(len(self.clients))]
        return 1 / np.array(epochs, dtype=np.float64) if outer.per_epoch else np.ones(len(epochs))

    def _class_weights(self, outer: OuterLoss) -> Tensor | None:
        weights = outer.class_weights(self._data.label_counts)
        return None if weights is None else weights.to(self._device, self._dtype)

    # --- small things ------------------------------------------------------------------------------------

    def _choose_kernel(self) -> Kernel:
        module = self._seeded_module("shape").to(self._device, self._dtype)
        check_trainable(module)
        kernel: Kernel = LinearStack(module) if LinearStack.fits(module) else AnyModule(module)
        return kernel

    def _seeded_module(self, run: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.integer(self.environment.seed, "model", run))
            return self._build()

    def _start(self, model: Tensor, lanes: int) -> list[Tensor]:
        return unflatten(model.expand(lanes, -1), self._kernel.shapes)

    def _rows(self, clients: np.ndarray) -> Tensor | slice:
        """Rows of these clients' data; a slice, which copies nothing, where they are all clients."""
        if len(clients) == len(self.clients):
            return slice(None)
        offsets = self._data.offsets
        return torch.cat([torch.arange(offsets[k], offsets[k + 1], device=self._device) for k in clients])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, self._dtype)

    def _column(self, values: np.ndarray) -> Tensor:
        return self._tensor(values)[:, None]

    def _refuse_divergence(self, raw: Tensor, loss: Tensor, round: int, there: np.ndarray) -> None:
        bad = ~(torch.isfinite(loss) & torch.isfinite(raw.sum(1)))
        if bool(bad.any()):
            client = self._data.keys[int(there[int(torch.nonzero(bad)[0])])]
            raise DivergenceError(
                f"round {round}: client '{client}' went non-finite during local training; lower the learning "
                f"rate (now {self.lr})."
            )


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _carries_gradients(update: LocalUpdate) -> bool:
    """Whether w^(t) − w_k = η c_k Σ_τ ∇ℓ_b(w^τ), so that the sum of gradients can be read off the model."""
    return not (update.mu or update.momentum)
