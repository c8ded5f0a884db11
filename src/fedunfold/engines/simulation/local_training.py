"""The clients of a round, or of rounds of several runs, on their local walks: there, and back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.federation import TrainRequest
from fedunfold.core.threading import threads_for
from fedunfold.engines.simulation.backend import LocalTrainer, TrainerFactory
from fedunfold.engines.simulation.backends.torch.local_training import OuterWeights, StepSums, TorchTrainer
from fedunfold.engines.simulation.drawing import BatchSampler
from fedunfold.engines.simulation.held_data import ClientEvaluator
from fedunfold.engines.simulation.kernels.base import numbers
from fedunfold.engines.simulation.round import CohortResult, Round
from fedunfold.engines.simulation.schedule import upload


@dataclass(frozen=True)
class CohortTrainer:
    """With the clients' learning rate and the size of a step, which says how many threads it is worth.

    Rounds that walk together are asked the same. A walk has a lane for each present client, in its own order.
    """

    lr: float
    walks: TrainerFactory
    drawing: BatchSampler
    held: ClientEvaluator
    step_size: int

    def forward(self, rounds: Sequence[Round]) -> CohortResult | None:
        """Let the present clients train, if there are any; a GPU may still be at it when this returns."""
        lanes = sum(len(round.there) for round in rounds)
        if not lanes:
            return None
        walk = self._walk(rounds)
        order, owners = _lanes(walk, rounds)
        begun, tally = _starts(rounds, owners), self._tally(rounds[0].request, lanes)
        with self._threads_of(walk):
            walked = walk.forward(begun, tally).sub_(begun)
        if (order != np.arange(lanes)).any():
            back = upload(np.argsort(order), walked.device)
            walked, tally = walked[back], tally.of(back)
        after = np.concatenate([round.after[round.there] for round in rounds])
        scales = self._column(after) if (after != 1).any() else None
        return CohortResult.by_walks(walked, scales, tally, numbers(self.walks.samples.kernel.statistics))

    def backward(self, rounds: Sequence[Round], adjoints: Sequence[Tensor]) -> list[Tensor]:
        """Of each round Σ_k (∂w_k/∂w^(t) − I)ᵀ p_k, with p_k = dL/dw_k, which is q_k times the factor after the loop,
        and the outer losses along the way."""
        walk = self._walk(rounds, back=True)
        if (
            isinstance(walk, TorchTrainer)
            and len(rounds) > 1
            and not isinstance(self._walk(rounds[:1], back=True), TorchTrainer)
        ):
            # What is kept of all of them is too much for one call or launch, but not that of one.
            return [self.backward([round], [rows])[0] for round, rows in zip(rounds, adjoints, strict=True)]
        order, owners = _lanes(walk, rounds)
        after = np.concatenate([round.after[round.there] for round in rounds])
        together = torch.cat(list(adjoints))
        arriving = together[upload(order, together.device)] * self._column(after[order])
        with self._threads_of(walk):
            leaving = walk.backward(_starts(rounds, owners), arriving)
        gained = leaving - arriving
        if len(rounds) > 1:
            gained = gained[upload(np.argsort(owners, kind="stable"), gained.device)]
        return [own.sum(0) for own in torch.split(gained, [len(round.there) for round in rounds])]

    def _walk(self, rounds: Sequence[Round], *, back: bool = False) -> LocalTrainer:
        request = rounds[0].request
        clients = [walk for round in rounds for walk in round.walks(round.there)]
        schedule = self.drawing.schedule(clients)
        lanes = list(schedule.order)
        columns = [self.lr * np.concatenate([round.inside[round.there] for round in rounds])]
        if request.outer is not None:
            columns.append(np.concatenate([round.client_factors(request.outer)[round.there] for round in rounds]))
        step_sizes, *factors = self.walks.samples.tensor(np.stack(columns)[:, lanes])
        outer = None
        if request.outer is not None:
            outer = OuterWeights(request.outer, factors[0], self.held.class_weights(request))
        adds_gradients = "gradients" in request.needs and not request.update.plain_steps
        parts = (schedule, step_sizes, request.update, outer)
        return self.walks.choose(*parts, adds_gradients=adds_gradients, back=back)

    def _tally(self, request: TrainRequest, lanes: int) -> StepSums:
        """What the walk has to add up itself, because w_k − w^(t) does not carry it."""
        carried, outer, x = request.update.plain_steps, request.outer, self.walks.samples.x
        along_the_path = request.path_gradient and outer is not None and not outer.only_last_layer
        own_outer = along_the_path and not (carried and outer is not None and outer.is_training_gradient)

        def sums() -> Tensor:
            return x.new_zeros(lanes, len(request.model))

        return StepSums(
            losses=x.new_empty(2, lanes),
            gradients=sums() if "gradients" in request.needs and not carried else None,
            outer_gradients=sums() if own_outer else None,
        )

    def _column(self, values: np.ndarray) -> Tensor:
        return self.walks.samples.tensor(values)[:, None]

    def _threads_of(self, walk: LocalTrainer) -> AbstractContextManager[None]:
        """Torch's, as many as its steps are worth; compiled code has its own."""
        return threads_for(self.step_size if isinstance(walk, TorchTrainer) else 0, self.walks.samples.threads)


def _lanes(walk: LocalTrainer, rounds: Sequence[Round]) -> tuple[np.ndarray, np.ndarray]:
    """Of every lane which of all present clients walks in it, and in which of the rounds."""
    order = np.array(walk.schedule.order)
    return order, np.repeat(np.arange(len(rounds)), [len(round.there) for round in rounds])[order]


def _starts(rounds: Sequence[Round], owners: np.ndarray) -> Tensor:
    """w^(t) of every lane, given its round."""
    if len(rounds) == 1:
        return rounds[0].request.model.expand(len(owners), -1)
    models = torch.stack([round.request.model for round in rounds])
    return models[upload(owners, models.device)]
