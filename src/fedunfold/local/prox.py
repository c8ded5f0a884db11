"""SGD with a proximal term."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State


@LOCAL_OPTIMIZERS.register("prox")
@dataclass(frozen=True)
class Prox(LocalOptimizer):
    """FedProx's client, SGD on ℓ + μ/2 ‖w − w^(t)‖²:  w ← w − η (∇ℓ_b(w) + μ (w − w^(t))).

    For clients that train long on data unlike the others': it keeps them near the shared model.

    Attributes:
        mu: μ ≥ 0.

    Reference: Li et al. 2020, Federated Optimization in Heterogeneous Networks.

    >>> Prox(mu=1.0).gradient_factors(steps=2, lr=0.5).tolist()
    [0.5, 1.0]
    """

    name: ClassVar[str] = "prox"
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise InputError(f"prox needs a finite mu >= 0, not {self.mu}.")

    @property
    def fused_mu(self) -> float | None:
        return self.mu

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return params - lr * (gradient + self.mu * (params - anchor)), state

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        """a_τ = (1 − ημ)^(τ_k − 1 − τ)."""
        remaining = np.arange(steps, 0, -1, dtype=np.float64)
        return np.asarray((1 - lr * self.mu) ** (remaining - 1))
