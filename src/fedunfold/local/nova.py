"""Local training whose progress does not depend on how many steps a client makes.

    τ_eff = Σ_k (N_k/N) ‖a_k‖₁      over the clients sampled for the round, one that makes no step counting 0

N_k/N is not renormalised over the clients that participate.

Reference: Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer
from fedunfold.local.momentum import Momentum
from fedunfold.local.prox import Prox
from fedunfold.local.sgd import SGD
from fedunfold.local.wrapped import Wrapped, register_around


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
class Accumulated(Wrapped):
    """Wang et al.'s general form: the client trains by its own optimiser unscaled, and then

        w_k ← w^(t) + (τ_eff/‖a_k‖₁) (w_k − w^(t)),      w_k − w^(t) = −η Σ_τ a_τ ∇ℓ(w^τ)

    With weights Θ̃_k = (N_k/N)‖a_k‖₁/τ_eff it equals its base under N_k/N.

    Attributes:
        base: The optimiser that clients train by: sgd, prox or momentum.

    >>> Accumulated(Momentum(rho=0.5)).name
    'accumulated-momentum'
    """

    prefix: ClassVar[str] = "accumulated"

    def __post_init__(self) -> None:
        if type(self.base) not in (SGD, Prox, Momentum):
            raise InputError(f"accumulated() takes sgd, prox or momentum as its base, not {self.base.name}.")

    @property
    def normalized(self) -> bool:
        return True

    @property
    def fused_mu(self) -> float | None:
        return self.base.fused_mu

    @property
    def uses_gradients_only(self) -> bool:
        return self.base.uses_gradients_only

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        return self.base.gradient_factors(steps, lr)

    def scales(self, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(num_examples)), _ratio(self, num_examples, num_steps, lr)


def _ratio(optimizer: LocalOptimizer, num_examples: np.ndarray, num_steps: np.ndarray, lr: float) -> np.ndarray:
    """τ_eff/‖a_k‖₁ of every client; 1 for one that makes no step."""
    norms = np.array([optimizer.gradient_factors(int(steps), lr).sum() for steps in num_steps])
    effective_steps = float(num_examples @ norms / num_examples.sum())
    return np.asarray(np.divide(effective_steps, norms, out=np.ones(len(norms)), where=norms > 0))


register_around(Accumulated, "sgd", "prox", "momentum")
