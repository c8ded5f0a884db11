"""Local training of the clients of a round, or of the same round of several runs: forward, and backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.control import Control, ControlledOptimizer
from fedunfold.core.messages import OuterTerms, TrainRequest
from fedunfold.core.own_layers import OwnEntries
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import Participation, RoundRng
from fedunfold.core.parts import OuterLoss, Selection
from fedunfold.core.threading import threads_for
from fedunfold.engines.simulation.backend import Backend, sums_gradients
from fedunfold.engines.simulation.backends.base import LocalTrainer, OuterWeights, StepSums
from fedunfold.engines.simulation.batching import BatchSampler, Clients, ClientSlice, ClientSlices, upload


@dataclass(frozen=True)
class RoundContext:
    """What is settled before anybody trains; arrays are over all K clients.

    Attributes:
        request: What was requested.
        rng: The round's randomness.
        slices: All clients' rows.
        cohort: Who was sampled.
        participating: Who trains.
        steps: τ_k; 0 for those who do not.
        step_sizes: η_k = η c_k inside the loop.
        update_scale: The factor on w_k − w^(t) after it.
        selection: How the cohort was sampled.
    """

    request: TrainRequest
    rng: RoundRng
    slices: ClientSlices
    cohort: np.ndarray
    participating: np.ndarray
    steps: np.ndarray
    step_sizes: np.ndarray
    update_scale: np.ndarray
    selection: Selection | None = None

    @classmethod
    def of(
        cls, request: TrainRequest, sampler: BatchSampler, lr: float, taking_part: Participation | None = None
    ) -> "RoundContext":
        """The round of a request, with those who are drawn for it, or with others."""
        rng = RoundRng(sampler.seed, request.run, request.round)
        taking_part = sampler.participation(rng, request.reported) if taking_part is None else taking_part
        cohort, participating = taking_part.cohort, taking_part.participating
        slices = sampler.slices(request.round)
        steps = np.where(participating, slices.steps(sampler.batch_size), 0)
        scales = request.optimizer.scales(np.where(cohort, sampler.sizes, 0), steps, lr)
        if (broadcast := request.broadcast) is not None:
            scales = np.full(len(slices), broadcast.step_scale), np.full(len(slices), broadcast.update_scale)
        step_sizes, after = lr * scales[0], scales[1]
        return cls(request, rng, slices, cohort, participating, steps, step_sizes, after, taking_part.selection)

    @cached_property
    def clients(self) -> np.ndarray:
        """Indices of those who train."""
        return np.flatnonzero(self.participating)

    @cached_property
    def absent(self) -> np.ndarray:
        """Indices of those who were sampled and do not."""
        return np.flatnonzero(self.cohort & ~self.participating)

    def slices_of(self, clients: np.ndarray) -> list[tuple[RoundRng, ClientSlice]]:
        """Randomness and rows of some clients."""
        return [(self.rng, self.slices[k]) for k in clients]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.request.model.device

    def own_models(self, clients: np.ndarray) -> Tensor:
        """What some clients start from, [P, d]: w^(t), with their own layers in it where they have some."""
        models, own = self.request.model.expand(len(clients), -1), self.request.own
        return models if own is None else own.put(models, clients.tolist())

    @cached_property
    def control(self) -> Control:
        """Control variates before the round."""
        return self.request.control or Control.start(self.request.model)

    def corrections(self, optimizer: ControlledOptimizer) -> Tensor:
        """v_k of those who train, [P, d]."""
        return optimizer.correction(self.control.rows(self.clients.tolist()), self.control.shared)

    def next_controls(self, optimizer: ControlledOptimizer, updates: Tensor, lr: float) -> Tensor:
        """s_k of those who trained after the round, [P, d], from their updates."""
        steps = torch.from_numpy(self.steps[self.clients])
        change = optimizer.change(self.control.shared, updates, steps, lr)
        return self.control.rows(self.clients.tolist()) + change

    def accept(self, accepted: np.ndarray) -> "RoundContext":
        """The same, where of those who train only some [P] are left."""
        participating = self.participating.copy()
        participating[self.clients] = accepted
        return replace(self, participating=participating)

    def client_factors(self, outer: OuterLoss) -> np.ndarray:
        """1/E_k where the outer loss counts a client once, else 1."""
        epochs = self.slices.epochs.astype(np.float64)
        return 1 / epochs if outer.per_epoch else np.ones(len(epochs))


@dataclass(frozen=True)
class CohortResult:
    """What local training gave, clients of several runs one after the other; a GPU may still be computing it.

    Attributes:
        movements: w^{τ_k} − w^(t), [P, d], 0 for buffers: it is for sums of gradients.
        updates: The same scaled by the factor after the loop, with buffers.
        sums: What was summed up along the steps.
        numbers: The training and the outer loss, and the norm of the update, [3, P].
        own: What the clients came to in layers that stay with them, [P, n], which the others are 0 in.
    """

    movements: Tensor
    updates: Tensor
    sums: StepSums
    numbers: Tensor
    own: Tensor | None = None

    @classmethod
    def of(cls, moved: Tensor, scales: Tensor | None, sums: StepSums, layout: ParamLayout) -> "CohortResult":
        """From where the clients came to; buffers are not scaled."""
        updates = moved if scales is None else moved * scales
        if layout.num_buffer_entries:
            buffers = layout.buffers(moved)
            updates = layout.with_buffers(updates, buffers)
            moved = layout.with_buffers(moved, torch.zeros_like(buffers))
        return cls(moved, updates, sums, torch.cat([sums.losses, updates.norm(dim=1)[None]]))

    def split(self, clients: Sequence[int]) -> "list[CohortResult]":
        """One for each run, of so many clients; all numbers are waited for."""
        whole, ends = replace(self, numbers=self.numbers.cpu().double()), np.cumsum(clients)
        if len(clients) == 1:
            return [whole]
        return [whole.select(slice(end - count, end)) for end, count in zip(ends, clients, strict=True)]

    def select(self, clients: Tensor | slice) -> "CohortResult":
        """Those of some clients; their numbers are on the host."""
        there = clients.to(self.updates.device) if isinstance(clients, Tensor) else clients
        sums, numbers = _select(self.sums, there), self.numbers[:, clients]
        own = None if self.own is None else self.own[there]
        return CohortResult(self.movements[there], self.updates[there], sums, numbers, own)

    def gradients(self, context: RoundContext) -> Tensor:
        """Sums of the clients' training gradients, [P, d]."""
        own = self.sums.gradients
        return self.movements * self._per_update(context)[:, None] if own is None else own

    def outer_terms(self, context: RoundContext, loss: float, gradient: Tensor | None) -> OuterTerms:
        """What the clients add to the outer loss and to λ_t, beside the terms of absent ones that are given."""
        request, own = context.request, self.sums.outer_gradients
        client_losses = client_gradients = None
        if request.compares_updates and request.outer is not None:
            client_losses = self.numbers[1]
        elif request.outer is not None:
            loss += float(self.numbers[1].sum())
        if request.path_gradient and (outer := request.outer_along_path) is not None:
            scale = self._per_update(context, context.client_factors(outer))
            if request.compares_updates:
                client_gradients = self.movements * scale[:, None] if own is None else own
            else:
                total = scale @ self.movements if own is None else own.sum(0)
                gradient = total if gradient is None else gradient + total
        return OuterTerms(loss, gradient, client_losses, client_gradients)

    def _per_update(self, context: RoundContext, factors: np.ndarray | float = 1.0) -> Tensor:
        """−f_k/η_k: without prox and state w^(t) − w_k = η_k Σ ∇ℓ_b, so that gradients need no summing up."""
        scale = -factors / context.step_sizes
        return upload(scale[context.clients], self.movements.device, self.movements.dtype)


@dataclass(frozen=True)
class CohortTrainer:
    """Trains the participating clients of rounds that request the same, each in a slot of its own.

    Attributes:
        backend: What computes.
        sampler: Draws minibatches.
        class_weights: The outer loss's, from a request.
        step_size: Multiplications of a step of all clients, which says how many threads it is worth.
    """

    backend: Backend
    sampler: BatchSampler
    class_weights: Callable[[TrainRequest], Tensor | None]
    step_size: int

    def forward(self, rounds: Sequence[RoundContext]) -> CohortResult:
        """Train the clients, if there are any; a GPU may still be computing when this returns."""
        request, layout = rounds[0].request, self.backend.kernel.layout
        slots = sum(len(context.clients) for context in rounds)
        if not slots:
            nothing = CohortResult.of(request.model.new_empty(0, layout.size), None, self._sums(request, 0), layout)
            return nothing if request.own is None else replace(nothing, own=nothing.updates[:, request.own.places])
        trainer = self._trainer(rounds)
        order, owners = _slots(trainer, rounds)
        start, sums = _starts(rounds, order, owners), self._sums(request, slots)
        with self._threads_of(trainer):
            ended = trainer.forward(start, sums)
        own = None if request.own is None else ended[:, request.own.places]
        moved = ended.sub_(start)
        if request.own is not None:
            moved, sums = request.own.shared(moved), _shared(sums, request.own)
        if (order != np.arange(slots)).any():
            back = upload(np.argsort(order), moved.device)
            moved, sums, own = moved[back], _select(sums, back), None if own is None else own[back]
        after = np.concatenate([context.update_scale[context.clients] for context in rounds])
        scales = self._column(after) if (after != 1).any() else None
        return replace(CohortResult.of(moved, scales, sums, layout), own=own)

    def backward(self, rounds: Sequence[RoundContext], adjoints: Sequence[Tensor]) -> list[Tensor]:
        """Of each round Σ_k (∂w_k/∂w^(t) − I)ᵀ p_k, with p_k = dL/dw_k, which is q_k times the factor after the loop,
        and the outer losses along the path."""
        trainer = self._trainer(rounds, backward=True)
        in_torch = trainer.uses_torch_threads
        if len(rounds) > 1 and in_torch and not self._trainer(rounds[:1], backward=True).uses_torch_threads:
            # What is stored of all of them is too much for one call or launch, but not that of one.
            return [self.backward([context], [rows])[0] for context, rows in zip(rounds, adjoints, strict=True)]
        order, owners = _slots(trainer, rounds)
        after = np.concatenate([context.update_scale[context.clients] for context in rounds])
        together = torch.cat(list(adjoints))
        arriving = together[upload(order, together.device)] * self._column(after[order])
        with self._threads_of(trainer):
            leaving = trainer.backward(_starts(rounds, order, owners), arriving)
        gained = leaving - arriving
        if len(rounds) > 1:
            gained = gained[upload(np.argsort(owners, kind="stable"), gained.device)]
        return [own.sum(0) for own in torch.split(gained, [len(context.clients) for context in rounds])]

    def _trainer(self, rounds: Sequence[RoundContext], *, backward: bool = False) -> LocalTrainer:
        request, backend = rounds[0].request, self.backend
        clients: Clients = [own for context in rounds for own in context.slices_of(context.clients)]
        batches = self.sampler.batches(clients)
        columns = [np.concatenate([context.step_sizes[context.clients] for context in rounds])]
        if request.outer is not None:
            factors = [context.client_factors(request.outer)[context.clients] for context in rounds]
            columns.append(np.concatenate(factors))
        step_sizes, *of_outer = upload(np.stack(columns)[:, list(batches.order)], backend.device, backend.dtype)
        outer = None
        if request.outer is not None:
            outer = OuterWeights(request.outer, of_outer[0], self.class_weights(request))
        corrections = None
        if isinstance(local := request.optimizer, ControlledOptimizer):
            corrections = torch.cat([context.corrections(local) for context in rounds])[list(batches.order)]
        return backend.select_trainer(batches, step_sizes, outer, request, backward=backward, corrections=corrections)

    def _sums(self, request: TrainRequest, slots: int) -> StepSums:
        """What has to be summed up along the steps, because w_k − w^(t) does not carry it."""
        carried, outer, model = request.optimizer.fused_mu == 0, request.outer_along_path, request.model
        own_outer = request.path_gradient and outer is not None and not (carried and outer.is_training_gradient)
        wanted = sums_gradients(request), own_outer
        zeros = (model.new_zeros(slots, len(model)) if summed else None for summed in wanted)
        return StepSums(model.new_empty(2, slots), *zeros)

    def _column(self, values: np.ndarray) -> Tensor:
        return upload(values, self.backend.device, self.backend.dtype)[:, None]

    def _threads_of(self, trainer: LocalTrainer) -> AbstractContextManager[None]:
        """Torch's, as many as its steps are worth; compiled code has its own."""
        return threads_for(self.step_size if trainer.uses_torch_threads else 0, self.backend.threads)


def _select(sums: StepSums, slots: Tensor | slice) -> StepSums:
    """Those of some slots."""
    own, outer = sums.gradients, sums.outer_gradients
    return StepSums(sums.losses[:, slots], None if own is None else own[slots], None if outer is None else outer[slots])


def _slots(trainer: LocalTrainer, rounds: Sequence[RoundContext]) -> tuple[np.ndarray, np.ndarray]:
    """Of every slot which of all participating clients trains in it, and in which of the rounds."""
    order = np.array(trainer.batches.order)
    return order, np.repeat(np.arange(len(rounds)), [len(context.clients) for context in rounds])[order]


def _shared(sums: StepSums, own: OwnEntries) -> StepSums:
    """Without what belongs to layers that stay with the clients."""
    return replace(sums, gradients=None if sums.gradients is None else own.shared(sums.gradients))


def _starts(rounds: Sequence[RoundContext], order: np.ndarray, owners: np.ndarray) -> Tensor:
    """w^(t) of every slot, given its client and its round, with the client's own layers in it where it has some."""
    if rounds[0].request.own is not None:
        return torch.cat([context.own_models(context.clients) for context in rounds])[upload(order, rounds[0].device)]
    if len(rounds) == 1:
        return rounds[0].request.model.expand(len(owners), -1)
    models = torch.stack([context.request.model for context in rounds])
    return models[upload(owners, models.device)]
