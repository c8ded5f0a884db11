"""Plain averaging, with a step size of the server's own if one is wanted."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State


@SERVER_OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """w^(t+1) = w^(t) + η u; with η = 1 that is Σ_k Θ_k w_k, FedAvg's.

    Attributes:
        lr: η > 0, the server's learning rate.

    >>> import torch
    >>> SGD().update(torch.tensor([1.0]), torch.tensor([0.5]), ())[0].tolist()
    [1.5]
    """

    name: ClassVar[str] = "sgd"
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_open_interval(self, lr=math.inf)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        return model + (direction if self.lr == 1 else self.lr * direction), ()

    def vjp(
        self,
        model: Tensor,
        direction: Tensor,
        state: State,
        adjoint_model: Tensor,
        adjoint_state: State,
        info: RoundInfo | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """By hand, because it is what nearly every run takes: no graph."""
        return adjoint_model, adjoint_model if self.lr == 1 else self.lr * adjoint_model, ()


def check_open_interval(part: ServerOptimizer, **limits: float) -> None:
    """Refuse settings that are not between 0 and their limit."""
    for setting, limit in limits.items():
        value = getattr(part, setting)
        if not 0 < value < limit:
            raise InputError(f"server optimiser {part.name} needs 0 < {setting} < {limit}, not {value}.")
