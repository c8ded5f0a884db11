"""Server momentum."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State
from fedunfold.server.sgd import check_open_interval


@SERVER_OPTIMIZERS.register("momentum")
@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """FedAvgM:  m ← β m + u,  w ← w + η m, from m = 0.

    The direction is averaged over the rounds, which smooths what absences and skew add to it.

    Attributes:
        beta: β, 0 ≤ β < 1.
        lr: η > 0, the server's learning rate.

    Reference: Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification.

    >>> server, w = Momentum(beta=0.5), torch.zeros(1)
    >>> w, state = server.update(w, torch.ones(1), server.init(w))
    >>> server.update(w, torch.ones(1), state)[0].tolist()
    [2.5]
    """

    name: ClassVar[str] = "momentum"
    beta: float = 0.9
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_open_interval(self, lr=math.inf)
        if not 0 <= self.beta < 1:
            raise InputError(f"server optimiser momentum needs 0 <= beta < 1, not {self.beta}.")

    def init(self, model: Tensor) -> State:
        return (torch.zeros_like(model),)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        m = self.beta * state[0] + direction
        return model + self.lr * m, (m,)
