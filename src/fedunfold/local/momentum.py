"""SGD with heavy-ball momentum."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State


@LOCAL_OPTIMIZERS.register("momentum")
@dataclass(frozen=True)
class Momentum(LocalOptimizer):
    """Heavy-ball SGD, from v = 0 in every round:  v ← ρ v + ∇ℓ_b(w),  w ← w − η v.

    Attributes:
        rho: ρ, 0 < ρ < 1.

    >>> Momentum(rho=0.5).gradient_factors(steps=2, lr=0.1).tolist()
    [1.5, 1.0]
    """

    name: ClassVar[str] = "momentum"
    rho: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise InputError(f"momentum needs 0 < rho < 1, not {self.rho}.")

    @property
    def uses_gradients_only(self) -> bool:
        return True

    def init(self, params: Tensor) -> State:
        return (torch.zeros_like(params),)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        velocity = self.rho * state[0] + gradient
        return params - lr * velocity, (velocity,)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        """a_τ = (1 − ρ^(τ_k − τ)) / (1 − ρ)."""
        remaining = np.arange(steps, 0, -1, dtype=np.float64)
        return np.asarray((1 - self.rho**remaining) / (1 - self.rho))
