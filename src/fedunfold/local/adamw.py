"""Adam with decoupled weight decay."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State


@LOCAL_OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(LocalOptimizer):
    """AdamW, from m = v = 0 in every round; the steps of `torch.optim.AdamW`, g being ∇ℓ_b(w):

        m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,
        w ← (1 − ηλ) w − η (m / (1 − β₁^τ)) / (√(v / (1 − β₂^τ)) + ε)        in step τ = 1, 2, …

    For transformers and their adapters, which plain SGD hardly trains.

    Attributes:
        beta1: β₁, 0 ≤ β₁ < 1.
        beta2: β₂, 0 ≤ β₂ < 1.
        eps: ε > 0.
        weight_decay: λ ≥ 0.

    Reference: Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization.

    >>> AdamW(weight_decay=0.1).describe()
    {'name': 'adamw', 'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08, 'weight_decay': 0.1}
    """

    name: ClassVar[str] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise InputError(f"adamw needs 0 <= beta1, beta2 < 1, not {self.beta1} and {self.beta2}.")
        if not (0 < self.eps < math.inf and 0 <= self.weight_decay < math.inf):
            raise InputError(f"adamw needs eps > 0 and weight_decay >= 0, not {self.eps} and {self.weight_decay}.")

    @property
    def uses_gradients_only(self) -> bool:
        return self.weight_decay == 0

    def init(self, params: Tensor) -> State:
        """m, v and how many steps were made."""
        return torch.zeros_like(params), torch.zeros_like(params), torch.zeros_like(params[:, :1])

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        m = self.beta1 * state[0] + (1 - self.beta1) * gradient
        v = self.beta2 * state[1] + (1 - self.beta2) * gradient.square()
        count = state[2] + 1
        unbiased, root = m / (1 - self.beta1**count), _root(v / (1 - self.beta2**count))
        return (1 - lr * self.weight_decay) * params - lr * unbiased / (root + self.eps), (m, v, count)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        raise InputError(f"{self.name}: its updates are no weighted sums of gradients; choose sgd, prox or momentum.")


def _root(values: Tensor) -> Tensor:
    """√v, with the slope 0 at v = 0: there all gradients were 0, and √v stands beside m = 0."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1).sqrt(), 0)
