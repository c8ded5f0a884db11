"""Rows that the server holds, read by the same kernel as the clients'."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedunfold.core.participation import RoundRng
from fedunfold.core.parts import OuterLoss
from fedunfold.core.rng import generator
from fedunfold.engines.simulation.evaluation import Evaluator


class TrainingLoss(OuterLoss):
    """What clients train for, as a loss that is evaluated."""

    name: ClassVar[str] = "training"
    is_training_loss: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class ServerRows:
    """The rows of the server in one round of a run (`core.server_data.ServerData`).

    Attributes:
        evaluator: Reads them.
        rng: What their order is drawn by.
    """

    evaluator: Evaluator
    rng: RoundRng

    def __len__(self) -> int:
        """How many rows there are."""
        return self.evaluator.num_rows

    def minibatches(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        """The rows of every minibatch of an epoch."""
        drawn = generator(self.rng.seed, "server-data", self.rng.run, self.rng.round, epoch)
        order = drawn.permutation(len(self)).astype(np.int32)
        return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]

    def loss_and_gradient(self, model: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """The mean training loss of some rows at a model, and its gradient."""
        means = model.new_full((len(rows),), 1 / len(rows))
        return self.evaluator.outer(model, np.sort(rows), means, TrainingLoss())
