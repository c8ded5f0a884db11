"""Local update rules: what client k does between receiving w^(t) and returning w_k.

In the loop, for τ = 0 … τ_k−1 on minibatches b:

    w_k ← w_k − η · c_k · (∇ℓ_b(w_k) + μ (w_k − w^(t)))

| rule        | c_k        | μ | then                                   |
|-------------|------------|---|----------------------------------------|
| sgd         | 1          | 0 |                                        |
| prox(μ)     | 1          | μ |                                        |
| nova        | τ_eff/τ_k  | 0 |                                        |
| momentum(ρ) | 1          | 0 | with a heavy-ball buffer v ← ρ v + ∇ℓ   |
| accumulated | the base's |   | w_k ← w^(t) + (τ_eff/‖a_k‖₁)(w_k − w^(t)) |

*Accumulated* is the general formulation of Wang et al. 2020: the client walks its own rule unscaled, which
gives w_k − w^(t) = −η Σ_τ a_τ ∇ℓ(w^τ), and the sum is rescaled to τ_eff effective steps. With weights
Θ̃_k = (N_k/N)‖a_k‖₁/τ_eff it equals its base rule under N_k/N.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedunfold.core.errors import InputError


@dataclass(frozen=True)
class LocalOptimizer:
    """One row of the table above."""

    name: str
    mu: float = 0.0
    momentum: float = 0.0
    normalise_steps: bool = False
    accumulate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise InputError(f"{self.name} needs a finite mu >= 0, not {self.mu}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"{self.name} needs 0 <= momentum < 1, not {self.momentum}.")

    @property
    def plain_steps(self) -> bool:
        """Whether w^(t) − w_k = η c_k Σ_τ ∇ℓ_b, so that the update carries the sum of its gradients."""
        return not (self.mu or self.momentum)

    def gradient_factors(self, steps: int, lr: float) -> np.ndarray:
        """a_τ for τ = 0 … steps−1: how much the gradient met at step τ counts in w^(t) − w_k, over η.

        prox: a_τ = (1−ημ)^(τ_k−1−τ);  momentum: a_τ = (1−ρ^(τ_k−τ))/(1−ρ);  otherwise 1.
        """
        remaining = np.arange(steps, 0, -1, dtype=np.float64)
        if self.momentum:
            return np.asarray((1 - self.momentum**remaining) / (1 - self.momentum))
        return np.asarray((1 - lr * self.mu) ** (remaining - 1))

    def factor_norms(self, steps: np.ndarray, lr: float) -> np.ndarray:
        """‖a_k‖₁ per client; 0 for a client that makes no step."""
        return np.array([self.gradient_factors(int(n), lr).sum() for n in steps])

    def scales(self, sizes: np.ndarray, steps: np.ndarray, lr: float) -> tuple[np.ndarray, np.ndarray]:
        """Per client (c_k inside the loop, factor on w_k − w^(t) after it).

        τ_eff = Σ_k (N_k/N) ‖a_k‖₁ over all clients, those making no step counting 0; N_k/N is not
        renormalised over the present ones.
        """
        ones = np.ones(len(sizes))
        if not (self.normalise_steps or self.accumulate):
            return ones, ones
        norms = self.factor_norms(steps, lr)
        effective_steps = float(sizes @ norms / sizes.sum())
        ratio = np.divide(effective_steps, norms, out=ones.copy(), where=norms > 0)
        return (ones, ratio) if self.accumulate else (ratio, ones)


def sgd() -> LocalOptimizer:
    """Plain stochastic gradient descent (FedAvg's client).

    >>> sgd().gradient_factors(steps=3, lr=0.1).tolist()
    [1.0, 1.0, 1.0]
    """
    return LocalOptimizer("sgd")


def prox(mu: float = 0.01) -> LocalOptimizer:
    """SGD pulled back to w^(t) by μ/2 ‖w − w^(t)‖² (FedProx's client).

    >>> prox(mu=1.0).gradient_factors(steps=2, lr=0.5).tolist()
    [0.5, 1.0]
    """
    return LocalOptimizer("prox", mu=mu)


def nova() -> LocalOptimizer:
    """SGD whose steps are scaled by τ_eff/τ_k, so that slow clients go as far as fast ones (FedNova).

    >>> nova().scales(sizes=np.array([10, 10]), steps=np.array([1, 3]), lr=0.1)[0].round(2).tolist()
    [2.0, 0.67]
    """
    return LocalOptimizer("nova", normalise_steps=True)


def momentum(rho: float = 0.9) -> LocalOptimizer:
    """Heavy-ball SGD. It can be run; learning weights through it is refused.

    >>> momentum(rho=0.5).gradient_factors(steps=2, lr=0.1).tolist()
    [1.5, 1.0]
    """
    if not 0 < rho < 1:
        raise InputError(f"momentum needs 0 < rho < 1, not {rho}.")
    return LocalOptimizer("momentum", momentum=rho)


def accumulated(base: LocalOptimizer) -> LocalOptimizer:
    """Wang et al.'s general form over sgd, prox or momentum: walk unscaled, then rescale to τ_eff.

    >>> accumulated(momentum(rho=0.5)).name
    'accumulated-momentum'
    """
    if base.normalise_steps or base.accumulate:
        raise InputError(f"accumulated() takes sgd, prox or momentum as its base, not {base.name}.")
    return replace(base, name=f"accumulated-{base.name}", accumulate=True)
