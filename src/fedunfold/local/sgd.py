"""Plain stochastic gradient descent."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State


@LOCAL_OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(LocalOptimizer):
    """FedAvg's client:  w ← w − η ∇ℓ_b(w).

    >>> SGD().gradient_factors(steps=3, lr=0.1).tolist()
    [1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "sgd"
    fused_mu: ClassVar[float | None] = 0.0

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return params - lr * gradient, state
