"""Local training whose progress does not depend on how many steps a client makes.

    τ_eff = Σ_k (N_k/N) ‖a_k‖₁      over the clients sampled for the round, one that makes no step counting 0

N_k/N is not renormalised over the clients that participate.

Reference: Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer, State
from fedunfold.local.momentum import Momentum
from fedunfold.local.prox import Prox
from fedunfold.local.sgd import SGD


@LOCAL_OPTIMIZERS.register("nova")
@dataclass(frozen=True)
class Nova(SGD):
    """FedNova in the form of the paper, SGD with steps scaled by c_k = τ_eff/τ_k: slow clients go as far as fast ones.

    >>> Nova().scales(np.array([10, 10]), np.array([1, 3]), lr=0.1)[0].round(2).tolist()
    [2.0, 0.67]
    """

    name: ClassVar[str] = "nova"

    @property
    def normalized(self) -> bool:
        return True

    def scales(self, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
        return _ratio(self, num_examples, num_steps, lr), np.ones(len(num_examples))


@dataclass(frozen=True)
class Accumulated(LocalOptimizer):
    """Wang et al.'s general form: the client trains by its own optimiser unscaled, and then

        w_k ← w^(t) + (τ_eff/‖a_k‖₁) (w_k − w^(t)),      w_k − w^(t) = −η Σ_τ a_τ ∇ℓ(w^τ)

    With weights Θ̃_k = (N_k/N)‖a_k‖₁/τ_eff it equals its base under N_k/N. Registered for sgd, prox and momentum as
    accumulated-sgd, accumulated-prox and accumulated-momentum.

    Attributes:
        base: The optimiser that clients train by.

    >>> Accumulated(Momentum(rho=0.5)).name
    'accumulated-momentum'
    """

    base: LocalOptimizer = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if self.base.normalized:
            raise InputError(f"accumulated() takes sgd, prox or momentum as its base, not {self.base.name}.")

    @property
    def name(self) -> str:  # type: ignore[override]  # of an instance, because it has the base's name in it
        return f"accumulated-{self.base.name}"

    def describe(self) -> dict[str, Any]:
        return self.base.describe() | {"name": self.name}

    @property
    def normalized(self) -> bool:
        return True

    @property
    def fused_mu(self) -> float | None:
        return self.base.fused_mu

    @property
    def uses_gradients_only(self) -> bool:
        return self.base.uses_gradients_only

    def init(self, params: Tensor) -> State:
        return self.base.init(params)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return self.base.step(params, gradient, state, lr, anchor)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        return self.base.gradient_factors(steps, lr)

    def scales(self, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(num_examples)), _ratio(self, num_examples, num_steps, lr)


def _ratio(optimizer: LocalOptimizer, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> np.ndarray:
    """τ_eff/‖a_k‖₁ of every client; 1 for one that makes no step."""
    norms = np.array([optimizer.gradient_factors(int(steps), lr).sum() for steps in num_steps])
    effective_steps = float(num_examples @ norms / num_examples.sum())
    return np.asarray(np.divide(effective_steps, norms, out=np.ones(len(norms)), where=norms > 0))


@LOCAL_OPTIMIZERS.register("accumulated-sgd")
def _accumulated_sgd() -> Accumulated:
    return Accumulated(SGD())


@LOCAL_OPTIMIZERS.register("accumulated-prox")
def _accumulated_prox(mu: float = 0.01) -> Accumulated:
    return Accumulated(Prox(mu))


@LOCAL_OPTIMIZERS.register("accumulated-momentum")
def _accumulated_momentum(rho: float = 0.9) -> Accumulated:
    return Accumulated(Momentum(rho))
