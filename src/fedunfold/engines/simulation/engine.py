"""The `Federation` contract in one process."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.messages import ClientInfo, ClientMetrics, ClientUpdates, OpenUpdates, TrainRequest
from fedunfold.core.outcomes import Evaluation, OuterLossResult
from fedunfold.core.params import (
    ModelFactory,
    checked_factory,
    copy_model,
    flatten_model,
    frozen_digest,
    full_precision,
    load_model,
    place_model,
    seeded,
)
from fedunfold.core.participation import Participation, RoundRng
from fedunfold.core.server_data import ServerData
from fedunfold.core.threading import threads_for
from fedunfold.data.datasets import DatasetRows
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.backend import Backend, default_budget
from fedunfold.engines.simulation.backends.cuda.jit import multiprocessors
from fedunfold.engines.simulation.batching import BatchSampler, samples_of
from fedunfold.engines.simulation.evaluation import ClientEvaluator, Evaluator
from fedunfold.engines.simulation.kernels import choose_kernel
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.local_training import CohortResult, CohortTrainer, RoundContext
from fedunfold.engines.simulation.server_data import ServerRows

NOT_FINITE = "went non-finite during local training"
Absent = tuple[np.ndarray, tuple[Tensor, Tensor] | None]
"""Losses of absent clients [K], and their outer loss with its gradient."""


class SimulatedFederation:
    """All clients of an environment in this process.

    Stacks of linear layers take a path of their own, anything else runs as it is, client by client, with the same
    result. It computes with as many threads as torch has when it is made; beside a GPU these only draw minibatches.

    Args:
        environment: The federation.
        data: Its data; by default what the environment loads.
        model: A function that builds a fresh model of the task; by default the environment's own.
        device: Where it computes.
        dtype: In which precision.
        memory_budget: Bytes of iterates that the exact adjoint stores of one round; by default 768 MiB, or a quarter
            of a GPU's memory.

    >>> import fedunfold as fu
    >>> federation = fu.SimulatedFederation(fu.environment("digits-label-skew"))
    >>> federation.kernel, len(federation.clients), federation.initial_model("trial-0").shape
    ('MLPKernel', 5, torch.Size([2410]))
    """

    sums_only = False

    def __init__(
        self,
        environment: Environment,
        data: FederatedData | None = None,
        *,
        model: ModelFactory | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        memory_budget: int | None = None,
    ) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"the type of the models is torch.float32 or torch.float64, not {dtype!r}.")
        self.environment = environment
        self.lr = environment.lr
        """η, the clients' learning rate."""
        self.data = data = environment.load() if data is None else data
        self.device, self._dtype = torch.device(device), dtype
        samples = samples_of(data.inputs, data.y, self.device, dtype)
        self._build = checked_factory(model) or model_factory(environment.model, data.features, data.task.num_outputs)
        built: object = seeded(self._build, environment.seed, "shape")
        if not isinstance(built, nn.Module):
            raise InputError(f"the function `model` must build a torch.nn.Module, not {type(built).__name__}.")
        self._template = place_model(copy_model(built), torch.device("cpu"), full_precision(built))
        _, x, y = next(samples.pieces(np.arange(min(64, len(samples))), 64))
        kernel = choose_kernel(place_model(built, self.device, dtype), x, y, data, environment.batch_size)
        self.layout = kernel.layout
        """What the entries of a model are."""
        self.kernel = type(kernel).__name__
        """Which path the model takes: `MLPKernel` or `ModuleKernel`."""
        # Threads that wait busily only stand in the way of one that keeps a GPU busy.
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        budget = default_budget(self.device) if memory_budget is None else memory_budget
        self._backend = Backend(kernel, samples, self.device, dtype, threads, budget)
        self._sampler = BatchSampler(environment, data, self.device, dtype, torch.get_num_threads())
        self._evaluator = ClientEvaluator(data, self._backend, self._sampler)
        self._label_counts = counts = data.known_label_counts
        self.clients: Sequence[ClientInfo] = tuple(map(ClientInfo, data.keys, data.sizes, map(tuple, counts.tolist())))
        self.step_size = self._sampler.max_rows * len(self.clients) * self.layout.num_params
        """Multiplications in a forward pass of one minibatch of every client, taking the model for dense."""
        self._trainer = CohortTrainer(self._backend, self._sampler, self._evaluator.class_weights, self.step_size)

    @property
    def max_parallel_runs(self) -> int:
        """One on a CPU and with models that go client by client, where runs one after the other are as fast and take
        less memory. On a GPU as many as it has multiprocessors for the clients of a round and memory for their updates
        in all rounds."""
        if self.device.type != "cuda" or not isinstance(self._backend.kernel, MLPKernel):
            return 1
        clients = self.environment.clients_per_round or len(self.clients)
        stored = self.environment.rounds * clients * self.layout.num_params * self._dtype.itemsize
        return max(1, min(multiprocessors(self.device) // clients, self._backend.memory_budget // stored))

    def initial_model(self, run: str) -> Tensor:
        """w^(0) of a run, [d]."""
        with self._threads():
            return flatten_model(seeded(self._build, self.environment.seed, run)).to(self.device, self._dtype)

    def module(self, model: Tensor) -> nn.Module:
        """The module with the model w [d] in it, on the CPU, ready to predict; frozen parameters are shared."""
        module = copy_model(self._template)
        load_model(module, model.cpu())
        return module.eval()

    def over(self, environment: Environment, data: FederatedData) -> "SimulatedFederation":
        """The same model, device and precision over another federation of this one's task."""
        build, budget = self._build, self._backend.memory_budget
        return SimulatedFederation(
            environment, data, model=build, device=self.device, dtype=self._dtype, memory_budget=budget
        )

    @cached_property
    def frozen_digest(self) -> str:
        """Stands for what of the model is not trained; empty where all of it is."""
        return frozen_digest(self._template)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        """One round of every run. On a GPU their clients train together."""
        with self._threads():
            of_sampler = self._sampler.required_metrics
            rounds = [
                self._context(replace(request, required_metrics=request.required_metrics | of_sampler))
                for request in requests
            ]
            if self._batches_runs(requests):
                return self._train(rounds)
            return [self._train([context])[0] for context in rounds]

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        """The same round of every run, backward. On a GPU their clients compute together."""
        if isinstance(self.data.inputs, DatasetRows) and not self.data.inputs.can_be_read_again:
            raise InputError(
                "an IterableDataset gives other samples each time, so that local training cannot be differentiated; "
                "take the first_order adjoint, or data sets with an index."
            )
        for rows in adjoints:
            self.layout.check(rows, "the adjoint")
        # Scaled as the round was run: with all who trained, also those who have been rejected since.
        trained = [self._context(request) for request in requests]
        rounds = [replace(context, participating=p.numpy()) for context, p in zip(trained, participated, strict=True)]
        with self._threads():
            if self._batches_runs(requests):
                return self._trainer.backward(rounds, adjoints)
            pairs = zip(rounds, adjoints, strict=True)
            return [self._trainer.backward([context], [rows])[0] for context, rows in pairs]

    def outer_loss(self, requests: Sequence[TrainRequest]) -> list[OuterLossResult]:
        """The final evaluation at w^(T) of every run."""
        with self._threads():
            everybody = np.ones(len(self.clients), dtype=bool)
            results = []
            for request in requests:
                context = self._context(request, Participation(everybody, everybody))
                loss, gradient = self._evaluator.outer_at(context, context.clients)
                results.append(OuterLossResult(self._finite(loss, context), gradient))
            return results

    def evaluate(self, models: Sequence[Tensor]) -> list[Evaluation]:
        """Accuracy and loss of models on the test set."""
        with self._threads():
            for model in models:
                self.layout.check(model, "the model")
            return self._evaluator.test(torch.stack(list(models)))

    def statistics(self, model: Tensor) -> tuple[Tensor, float]:
        """The task's statistics on the test set [M], which those of other rows are added to, and the mean loss."""
        with self._threads():
            self.layout.check(model, "the model")
            (found,) = self._evaluator.test_statistics(model[None])
            return found

    def server_data(self, request: TrainRequest) -> ServerData | None:
        """The rows that the server holds, as it meets them in a round; None where it holds none."""
        if self._server is None:
            return None
        return ServerRows(self._server, RoundRng(self.environment.seed, request.run, request.round))

    @cached_property
    def _server(self) -> Evaluator | None:
        if self.data.server is None:
            return None
        samples = samples_of(*self.data.server, self.device, self._dtype)
        return Evaluator(replace(self._backend, samples=samples))

    def client_accuracies(self, model: Tensor) -> Tensor:
        """The primary metric of one model [d], or of each client's own [K, d], on its training data, [K]."""
        with self._threads():
            self.layout.check(model, "the model")
            clients = np.arange(len(self.clients))
            models = model.to(self.device, self._dtype).expand(len(clients), -1)
            return self._evaluator.scores(models, clients)

    def _threads(self) -> AbstractContextManager[None]:
        """As many as the federation's steps are worth."""
        return threads_for(0 if self._backend.cpu else self.step_size, self._backend.threads)

    # --- one round ---------------------------------------------------------------------------------------

    def _context(self, request: TrainRequest, taking_part: Participation | None = None) -> RoundContext:
        self.layout.check(request.model, "the model")
        if request.control is not None:
            for vector in (request.control.shared, *request.control.own.values()):
                self.layout.check(vector, "a control variate")
        return RoundContext.of(request, self._sampler, self.lr, taking_part or request.participation)

    def _batches_runs(self, requests: Sequence[TrainRequest]) -> bool:
        """Whether the clients of these rounds train together: on a GPU, where the same is requested of them."""
        requested = {
            (r.optimizer, r.outer, r.required_metrics, r.path_gradient, r.curvature, r.broadcast is None)
            for r in requests
        }
        return self.device.type != "cpu" and len(requested) == 1

    def _train(self, rounds: Sequence[RoundContext]) -> list[ClientUpdates]:
        result = self._trainer.forward(rounds)
        self._draw_ahead(rounds)
        # All that a GPU has to do comes before the first number that is waited for.
        absent = [self._evaluate_absent(context) for context in rounds]
        self._sampler.upload_ahead()
        results = result.split([len(context.clients) for context in rounds])
        return [self._report(*of_run) for of_run in zip(rounds, results, absent, strict=True)]

    def _draw_ahead(self, rounds: Sequence[RoundContext]) -> None:
        """Draw the next round's minibatches while a GPU is busy with this one's, unless who trains depends on it."""
        if self.device.type == "cpu" or self._sampler.required_metrics or rounds[0].request.participation:
            return
        requests = [replace(context.request, round=context.request.round + 1) for context in rounds]
        following = [self._context(request) for request in requests]
        clients = [own for context in following for own in context.slices_of(context.clients)]
        if clients:
            self._sampler.draw_ahead(clients)

    def _evaluate_absent(self, context: RoundContext) -> Absent:
        """Absent clients at w^(t), where their losses are wanted."""
        request, losses = context.request, np.full(len(self.clients), np.nan)
        if not len(context.absent) or not request.evaluates_absent:
            return losses, None
        if "loss" in request.required_metrics:
            losses = self._evaluator.losses_at(context, context.absent, per_sample=False)
        outer = None if request.outer_along_path is None else self._evaluator.outer_at(context, context.absent)
        return losses, outer

    def _report(self, context: RoundContext, result: CohortResult, absent: Absent) -> ClientUpdates:
        request, trained = context.request, context.clients
        finite = np.isfinite(result.numbers.numpy()[[0, 2]]).all(0)  # whatever the outer loss is
        if result.own is not None:
            finite &= result.own.isfinite().all(1).cpu().numpy()
        if not finite.all():
            self._check_divergence(finite, context)
            context, result = context.accept(finite), result.select(torch.from_numpy(finite))
        # Buffers are no part of a step's norm.
        norms = result.numbers[2] if len(context.clients) and not self.layout.num_buffer_entries else None
        losses, outer = absent
        outer_terms = (0.0, None) if outer is None else (self._finite(outer[0], context), outer[1])
        return ClientUpdates(
            round=request.round,
            client_ids=self.data.keys,
            num_examples=torch.tensor(self._sampler.sizes, dtype=torch.float64),
            participated=torch.from_numpy(context.participating),
            num_steps=torch.from_numpy(np.where(context.participating, context.steps, 0)),
            updates=OpenUpdates(torch.from_numpy(context.clients), result.updates, norms),
            cohort=torch.from_numpy(context.cohort),
            selection=context.selection,
            metrics=self._metrics(context, result, losses),
            outer=result.outer_terms(context, *outer_terms),
            layout=self.layout,
            rejected={self.data.keys[k]: NOT_FINITE for k in trained[~finite]},
            label_counts=self._label_counts,
            lr=self.lr,
            server_data=self.server_data(request),
        )

    def _metrics(self, context: RoundContext, result: CohortResult, absent_losses: np.ndarray) -> ClientMetrics:
        """What was requested beside the updates."""
        request, clients = context.request, torch.from_numpy(context.clients)
        loss = start_loss = accuracy = norm = gradients = controls = None
        if "loss" in request.required_metrics:
            loss = torch.from_numpy(absent_losses)
            loss[clients] = result.numbers[0]
        if "start_loss" in request.required_metrics:
            reporting = np.flatnonzero(context.cohort) if request.absent_loss == "evaluate" else context.clients
            start_loss = torch.from_numpy(self._evaluator.losses_at(context, reporting, per_sample=True))
        if "accuracy" in request.required_metrics:
            self.data.task.check_metrics(request.required_metrics)
            accuracy = torch.full((len(self.clients),), math.nan, dtype=torch.float64)
            models = request.model + result.updates
            if request.own is not None and result.own is not None:
                models[:, request.own.places] = result.own
            accuracy[clients] = self._evaluator.scores(models, context.clients)
        if "norm" in request.required_metrics:
            norm = torch.full((len(self.clients),), math.nan, dtype=torch.float64)
            buffers = self.layout.num_buffer_entries
            own = self.layout.params(result.updates).norm(dim=1) if buffers else result.numbers[2]
            norm[clients] = own.to(norm)
        if "gradients" in request.required_metrics:
            gradients = result.gradients(context)
        if isinstance(local := request.optimizer, ControlledOptimizer) and len(clients):
            controls = context.next_controls(local, result.updates, self.lr)
            self.layout.buffers(controls).zero_()
        return ClientMetrics(loss, start_loss, accuracy, norm, gradients, result.own, controls)

    # --- divergence --------------------------------------------------------------------------------------

    def _finite(self, outer_loss: Tensor, context: RoundContext) -> float:
        loss = float(outer_loss)
        if not math.isfinite(loss):
            raise self._divergence("the outer loss of the shared model is not finite", context)
        return loss

    def _check_divergence(self, finite: np.ndarray, context: RoundContext) -> None:
        """One client that diverges is rejected; where nobody of a round is left, it is the training that diverges."""
        if not finite.any() and context.request.participation is None:
            others = f" and whoever else participated ({len(finite) - 1})" if len(finite) > 1 else ""
            first = self.data.keys[int(context.clients[0])]
            raise self._divergence(f"client '{first}'{others} {NOT_FINITE}", context)

    def _divergence(self, what: str, context: RoundContext) -> DivergenceError:
        return DivergenceError(f"round {context.request.round}: {what}; lower the learning rate (now {self.lr}).")
