"""The `Federation` contract in one process."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.federation import ClientInfo, ClientUpdates, Evaluation, OuterLossResult, TrainRequest
from fedunfold.core.params import ModelFactory, flat_model, seeded, set_flat_model
from fedunfold.core.threading import threads_for
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.backend import TrainerFactory
from fedunfold.engines.simulation.backends.cuda import multiprocessors
from fedunfold.engines.simulation.choosing import choose_kernel
from fedunfold.engines.simulation.drawing import BatchSampler
from fedunfold.engines.simulation.held_data import ClientEvaluator
from fedunfold.engines.simulation.kernels.base import numbers
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.engines.simulation.local_training import CohortTrainer
from fedunfold.engines.simulation.round import CohortResult, Round, RoundBuffers
from fedunfold.engines.simulation.samples import Evaluator

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
NOT_FINITE = "went non-finite during local training"


def _few_threads(
    verb: "Callable[Concatenate[SimulatedFederation, Arguments], Result]",
) -> "Callable[Concatenate[SimulatedFederation, Arguments], Result]":
    """Let a verb run with as many threads as the federation's steps are worth."""

    @wraps(verb)
    def run(self: "SimulatedFederation", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with threads_for(0 if self._samples.compiled_stack else self.step_size, self._threads):
            return verb(self, *args, **kwargs)

    return run


class SimulatedFederation:
    """All clients of an environment in this process.

    `model` builds a fresh classifier ([B, …] → logits [B, C]); by default the environment's own. Stacks of
    linear layers take a path of their own, anything else runs as it is, lane by lane, with the same result.
    `memory_budget` bounds the bytes of iterates that the exact adjoint keeps of one round; by default 768 MiB, or a
    quarter of a GPU's memory. It works with as many threads as torch has when it is made; beside a GPU
    these only draw minibatches.

    >>> import fedunfold as fu
    >>> federation = fu.SimulatedFederation(fu.environment("digits-label-skew"))
    >>> federation.kernel, len(federation.clients), federation.initial_model("trial-0").shape
    ('MLPKernel', 5, torch.Size([2410]))
    """

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
        self.data = data = environment.load() if data is None else data
        self._device, self._dtype = torch.device(device), dtype
        # Rows one after the other, as kernels read them; columns may lie so in a table that was given.
        x, y = data.x.to(self._device, dtype).contiguous(), data.y.to(self._device).contiguous()
        self._sizes = np.array(data.sizes, dtype=np.float64)
        if isinstance(model, nn.Module):
            raise InputError("pass a function that builds the model, such as `lambda: Net()`, not a built one.")
        if not (model is None or callable(model)):
            raise InputError(f"the model is a function that builds one, such as `lambda: Net()`, not {model!r}.")
        self._build = model or model_factory(environment.model, tuple(data.x.shape[1:]), data.classes)
        built: object = seeded(self._build, environment.seed, "shape")
        if not isinstance(built, nn.Module):
            raise InputError(f"the function `model` must build a torch.nn.Module, not {type(built).__name__}.")
        module = built.to(self._device, dtype)
        self._kernel = choose_kernel(module, x[:64], data, environment.batch_size)
        self._memory_budget = _memory(self._device) if memory_budget is None else memory_budget
        # Threads that wait busily only stand in the way of one that keeps a GPU busy.
        self._threads = torch.get_num_threads() if self._device.type == "cpu" else 1
        self._samples = Evaluator(self._kernel, x, y, self._threads)
        self._drawing = BatchSampler(environment, data, self._device, dtype, torch.get_num_threads())
        self._held = ClientEvaluator(data, self._samples, self._drawing)
        self.clients: Sequence[ClientInfo] = tuple(
            ClientInfo(key, size, tuple(counts.tolist()))
            for key, size, counts in zip(data.keys, data.sizes, data.label_counts, strict=True)
        )
        walks = TrainerFactory(self._samples, self._drawing.most_rows, self._memory_budget)
        self._walking = CohortTrainer(environment.lr, walks, self._drawing, self._held, self.step_size)

    @property
    def lr(self) -> float:
        return self.environment.lr

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def kernel(self) -> str:
        """Which path the model takes: `MLPKernel` or `ModuleKernel`."""
        return type(self._kernel).__name__

    @property
    def step_size(self) -> int:
        """Multiplications in a forward pass of one minibatch of every client, taking the model for dense."""
        rows = self._drawing.most_rows * len(self.clients)
        return rows * numbers(self._kernel.shapes)

    @property
    def max_parallel_runs(self) -> int:
        """One on a CPU and with models that go lane by lane, where runs one after the other are as fast and take less
        memory. On a GPU as many as it has multiprocessors for the clients of a round and memory for their updates in
        all rounds."""
        if self._device.type != "cuda" or not isinstance(self._kernel, MLPKernel):
            return 1
        clients = self.environment.clients_per_round or len(self.clients)
        kept = self.environment.rounds * clients * numbers(self._kernel.shapes) * self._dtype.itemsize
        return max(1, min(multiprocessors(self._device) // clients, self._memory_budget // kept))

    @_few_threads
    def initial_model(self, run: str) -> Tensor:
        return flat_model(seeded(self._build, self.environment.seed, run)).to(self._device, self._dtype)

    def train(self, request: TrainRequest) -> ClientUpdates:
        return self.train_together([request])[0]

    @_few_threads
    def train_together(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        """A round of several runs. On a GPU their clients walk side by side."""
        rounds = [self._round(request) for request in requests]
        if self._walk_side_by_side(requests):
            return self._trained(rounds)
        return [self._trained([round])[0] for round in rounds]

    def _trained(self, rounds: Sequence[Round]) -> list[ClientUpdates]:
        brought = self._walking.forward(rounds)
        self._look_ahead(rounds)
        # All that a GPU has to do comes before the first number that is waited for.
        found = [self._ask_absent(round) for round in rounds]
        self._drawing.send_ahead()
        if brought is None:
            return [self._report(round, None, own) for round, own in zip(rounds, found, strict=True)]
        parts = brought.of_runs([len(round.there) for round in rounds])
        return [self._report(*of_run) for of_run in zip(rounds, parts, found, strict=True)]

    def _report(self, round: Round, brought: CohortResult | None, found: RoundBuffers) -> ClientUpdates:
        request, asked = round.request, round.there
        if brought is not None and len(asked):
            round = self._gather(round, brought, found)
        if found.absent_loss is not None:
            found.outer_loss += self._finite(found.absent_loss, round)
        rejected = np.setdiff1d(asked, round.there) if len(asked) != len(round.there) else ()
        refused = {self.data.keys[k]: NOT_FINITE for k in rejected}
        needs = request.needs
        if "start_loss" in needs:
            asked = np.arange(len(self.clients)) if request.absent_loss == "evaluate" else round.there
            found.start_loss = self._held.losses_at(round, asked, per_sample=True)
        return ClientUpdates(
            round=request.round,
            keys=self.data.keys,
            sizes=torch.from_numpy(self._sizes.copy()),
            present=torch.from_numpy(round.present),
            steps=torch.from_numpy(np.where(round.present, round.steps, 0)),
            updates=found.updates,
            loss=torch.from_numpy(found.loss) if "loss" in needs else None,
            start_loss=torch.from_numpy(found.start_loss) if "start_loss" in needs else None,
            accuracy=torch.from_numpy(found.accuracy) if "accuracy" in needs else None,
            gradients=found.gradients if "gradients" in needs else None,
            outer_loss=found.outer_loss,
            outer_gradient=sum(found.outer_gradients[1:], found.outer_gradients[0]) if found.outer_gradients else None,
            per_client_outer_loss=found.per_client_outer_loss,
            per_client_outer_gradients=found.per_client_outer_gradients,
            norms=found.norms,
            statistics=self._statistics,
            refused=refused,
        )

    def backprop(self, request: TrainRequest, present: Tensor, adjoints: Tensor) -> Tensor:
        return self.backprop_together([request], [present], [adjoints])[0]

    @_few_threads
    def backprop_together(
        self, requests: Sequence[TrainRequest], presents: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        """The same round of several runs. On a GPU their clients walk back side by side."""
        for rows in adjoints:
            self._check_length(rows, "the adjoint")
        # Scaled as the round was run: with all who set out, also those who have been set aside since.
        set_out = [self._round(request) for request in requests]
        rounds = [replace(round, present=present.numpy()) for round, present in zip(set_out, presents, strict=True)]
        if self._walk_side_by_side(requests):
            return self._walking.backward(rounds, adjoints)
        return [self._walking.backward([round], [rows])[0] for round, rows in zip(rounds, adjoints, strict=True)]

    @_few_threads
    def outer(self, request: TrainRequest) -> OuterLossResult:
        everybody = np.ones(len(self.clients), dtype=bool)
        round = self._round(request, everybody)
        loss, gradient = self._held.outer_at(round, round.there)
        return OuterLossResult(self._finite(loss, round), gradient)

    def module(self, model: Tensor) -> nn.Module:
        """The classifier with the model w [d] in it, on the CPU, ready to predict."""
        module = seeded(self._build, self.environment.seed, "shape")
        set_flat_model(module, model.cpu())
        return module.eval()

    def evaluate(self, model: Tensor) -> Evaluation:
        return self.evaluate_together([model])[0]

    @_few_threads
    def evaluate_together(self, models: Sequence[Tensor]) -> list[Evaluation]:
        for model in models:
            self._check_length(model, "the model")
        return self._held.test(torch.stack(list(models)))

    @_few_threads
    def client_accuracies(self, model: Tensor) -> Tensor:
        """Accuracy of one model on each client's own training data, [K]."""
        self._check_length(model, "the model")
        clients = np.arange(len(self.clients))
        shared = model.to(self._device, self._dtype).expand(len(clients), -1)
        return torch.tensor(self._held.accuracies(shared, clients), dtype=torch.float64)

    # --- one round ---------------------------------------------------------------------------------------

    def _round(self, request: TrainRequest, present: np.ndarray | None = None) -> Round:
        """A round of those who are present, by default of those who are drawn."""
        self._check_length(request.model, "the model")
        draw = self._drawing.draw(request.run, request.round)
        present = self._drawing.present(draw) if present is None else present
        batch_size, shares = self.environment.batch_size, self._drawing.shares(request.round)
        steps = np.where(present, [share.steps(batch_size) for share in shares], 0)
        inside, after = request.update.scales(self._sizes, steps, self.lr)
        if request.scales is not None:
            inside, after = (np.full(len(shares), scale) for scale in request.scales)
        return Round(request, draw, shares, present, steps, inside, after)

    def _walk_side_by_side(self, requests: Sequence[TrainRequest]) -> bool:
        """Whether the clients of these rounds share a walk: on a GPU, where they are asked the same."""
        asked = {(r.update, r.outer, r.needs, r.path_gradient, r.class_weights is None) for r in requests}
        return self._device.type != "cpu" and len(asked) == 1

    def _look_ahead(self, rounds: Sequence[Round]) -> None:
        """Draw the next round's minibatches while a GPU is busy with this one's."""
        if self._device.type == "cpu":
            return
        requests = [replace(round.request, round=round.request.round + 1) for round in rounds]
        following = [self._round(request) for request in requests]
        clients = [walk for round in following for walk in round.walks(round.there)]
        if clients:
            self._drawing.draw_ahead(clients)

    @property
    def _statistics(self) -> int:
        """How many numbers at the end of a model are running statistics."""
        return numbers(self._kernel.statistics)

    def _gather(self, round: Round, brought: CohortResult, found: RoundBuffers) -> Round:
        """What the present clients' training brought; the round without those whose numbers are not finite."""
        request = round.request
        finite = np.isfinite(brought.numbers.numpy()[[0, 2]]).all(0)  # whatever the outer loss is
        if not finite.all():
            self._refuse_divergence(finite, round)
            brought, round = brought.of(torch.from_numpy(finite)), round.of(finite)
        there, tally, walked = round.there, brought.tally, brought.walked
        loss, outer_loss, norms = brought.numbers
        found.updates, found.loss[there] = brought.updates, loss.numpy()
        if not self._statistics:  # running statistics are no part of a step's length
            found.norms = norms
        if request.compares_updates:
            found.per_client_outer_loss = outer_loss
        elif request.outer is not None:
            found.outer_loss += float(outer_loss.sum())
        if "accuracy" in request.needs:
            found.accuracy[there] = self._held.accuracies(request.model + found.updates, there)
        if "gradients" not in request.needs and request.outer is None:
            return round
        # Without prox and momentum w^(t) − w_k = η c_k Σ ∇ℓ_b, so that sums of gradients need no adding up.
        per_update = -1 / (self.lr * round.inside[there])
        if "gradients" in request.needs:
            own = tally.gradients
            found.gradients = walked * self._samples.tensor(per_update)[:, None] if own is None else own
        if request.outer is None or request.outer.only_last_layer or not request.path_gradient:
            return round
        own = tally.outer_gradients
        scale = self._samples.tensor(round.client_factors(request.outer)[there] * per_update)
        if request.compares_updates:
            found.per_client_outer_gradients = walked * scale[:, None] if own is None else own
        else:
            found.outer_gradients.append(scale @ walked if own is None else own.sum(0))
        return round

    def _ask_absent(self, round: Round) -> RoundBuffers:
        """Absent clients' losses at w^(t), where they are wanted."""
        request = round.request
        found = RoundBuffers.none(len(self.clients), request.model)
        if not len(round.away) or not _asks_absent(request):
            return found
        if "loss" in request.needs:
            found.loss[round.away] = self._held.losses_at(round, round.away, per_sample=False)[round.away]
        if _outer_on_the_way(request):
            found.absent_loss, gradient = self._held.outer_at(round, round.away)
            found.outer_gradients.append(gradient)
        return found

    def _check_length(self, vectors: Tensor, name: str) -> None:
        size = numbers(self._kernel.shapes) + self._statistics
        if vectors.shape[-1:] != (size,):
            raise InputError(f"{name} has {vectors.shape[-1]} numbers, where this federation's model has {size}.")

    # --- small things ------------------------------------------------------------------------------------

    def _finite(self, outer_loss: Tensor, round: Round) -> float:
        loss = float(outer_loss)
        if not math.isfinite(loss):
            raise DivergenceError(
                f"round {round.request.round}: the outer loss of the shared model is not finite; lower the learning "
                f"rate (now {self.lr})."
            )
        return loss

    def _refuse_divergence(self, finite: np.ndarray, round: Round) -> None:
        """One client that diverges is set aside; where nobody is left, it is the training that diverges."""
        if not finite.any():
            others = f" and whoever else was there ({len(finite) - 1})" if len(finite) > 1 else ""
            raise DivergenceError(
                f"round {round.request.round}: client '{self.data.keys[int(round.there[0])]}'{others} went non-finite "
                f"during local training; lower the learning rate (now {self.lr})."
            )


def _outer_on_the_way(request: TrainRequest) -> bool:
    return request.outer is not None and not request.outer.only_last_layer


def _asks_absent(request: TrainRequest) -> bool:
    """Whether absent clients' losses at w^(t) are wanted."""
    return request.absent_loss == "evaluate" and ("loss" in request.needs or _outer_on_the_way(request))


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 4
    return 768 * 2**20
