"""What a weighting rule may do with rows that the server holds itself."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor


class ServerData(Protocol):
    """Rows that no client has and that are not in the test set, as a rule finds them in a round's report.

    Rows have numbers from 0. The order in which they come is drawn by the engine, so that a rule stays a pure function.
    """

    def __len__(self) -> int:
        """How many rows there are."""

    def minibatches(self, epoch: int, batch_size: int) -> Sequence[np.ndarray]:
        """The rows of every minibatch, all of them once, in an order drawn by run, round and epoch; the last is short.

        Args:
            epoch: Which pass over the rows.
            batch_size: How many rows a minibatch has.
        """

    def loss_and_gradient(self, model: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """The mean training loss of some rows at a model w [d], which only reads, and its gradient in w [d].

        Args:
            model: w; where the model has running statistics, these are the last entries, and have no gradient.
            rows: Which rows; where the losses of rows depend on each other, they are one minibatch.
        """
