"""One round on its way through the engine: what is settled before it, who is under way, and what it brings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.federation import TrainRequest
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation.backends.torch.local_training import StepSums
from fedunfold.engines.simulation.schedule import ClientSlice, RoundRng


@dataclass(frozen=True)
class Round:
    """What is settled before anybody trains; arrays are over all K clients.

    `inside` is c_k in the loop, `after` the factor on w_k − w^(t) after it.
    """

    request: TrainRequest
    draw: RoundRng
    shares: list[ClientSlice]
    present: np.ndarray
    steps: np.ndarray
    inside: np.ndarray
    after: np.ndarray

    @cached_property
    def there(self) -> np.ndarray:
        return np.flatnonzero(self.present)

    def walks(self, clients: np.ndarray) -> list[tuple[RoundRng, ClientSlice]]:
        """What each of some clients draws by, and its share."""
        return [(self.draw, self.shares[k]) for k in clients]

    @cached_property
    def away(self) -> np.ndarray:
        return np.flatnonzero(~self.present)

    def of(self, kept: np.ndarray) -> "Round":
        """The same, where of the present clients only these [P] are left."""
        present = self.present.copy()
        present[self.there] = kept
        return replace(self, present=present)

    def client_factors(self, outer: OuterLoss) -> np.ndarray:
        """1/E_k where the outer loss counts a client once, else 1."""
        epochs = np.array([share.epochs for share in self.shares], dtype=np.float64)
        return 1 / epochs if outer.per_epoch else np.ones(len(epochs))


@dataclass(frozen=True)
class CohortResult:
    """What the training of present clients brings, those of several runs one after the other; on a GPU it may still be
    on its way.

    `walked[P, d]` are w^{τ_k} − w^(t), and `updates` the same scaled by the factor after the loop. In `numbers[3, P]`
    are the training and the outer loss, and the length of the update.
    """

    walked: Tensor
    updates: Tensor
    tally: StepSums
    numbers: Tensor

    @classmethod
    def by_walks(cls, walked: Tensor, scales: Tensor | None, tally: StepSums, statistics: int) -> "CohortResult":
        """From where the clients walked; the last `statistics` numbers, running statistics, are not scaled."""
        updates = walked if scales is None else walked * scales
        if statistics:
            moved = walked[:, -statistics:]
            updates = torch.cat([updates[:, :-statistics], moved], 1)
            walked = torch.cat([walked[:, :-statistics], torch.zeros_like(moved)], 1)  # it is for gradients alone
        return cls(walked, updates, tally, torch.cat([tally.losses, updates.norm(dim=1)[None]]))

    def of_runs(self, clients: Sequence[int]) -> "list[CohortResult]":
        """One for each run, of so many clients; all numbers are waited for, and have come."""
        numbers, ends = self.numbers.cpu().double(), np.cumsum(clients)
        return [
            CohortResult(self.walked[part], self.updates[part], self.tally.of(part), numbers[:, part])
            for part in (slice(end - count, end) for end, count in zip(ends, clients, strict=True))
        ]

    def of(self, kept: Tensor) -> "CohortResult":
        """That of some of the clients [P]."""
        there = kept.to(self.walked.device)
        lanes = torch.nonzero(there).flatten()
        return CohortResult(self.walked[there], self.updates[there], self.tally.of(lanes), self.numbers[:, kept])


@dataclass
class RoundBuffers:
    """What a round brings, filled in by the clients who are there and those who are away.

    `absent_loss`, the part of these in the outer loss, may still be on its way.
    """

    loss: np.ndarray
    start_loss: np.ndarray
    accuracy: np.ndarray
    updates: Tensor
    gradients: Tensor
    norms: Tensor | None = None
    outer_loss: float = 0.0
    absent_loss: Tensor | None = None
    outer_gradients: list[Tensor] = field(default_factory=list)
    per_client_outer_loss: Tensor | None = None
    per_client_outer_gradients: Tensor | None = None

    @classmethod
    def none(cls, clients: int, model: Tensor) -> "RoundBuffers":
        unknown, nobody = np.full(clients, np.nan), model.new_empty(0, len(model))
        return cls(unknown.copy(), unknown.copy(), unknown.copy(), nobody, nobody)
