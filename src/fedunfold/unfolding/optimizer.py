"""Adam on θ (Kingma and Ba 2015), with or without momentum, as a pure step with its state in the open.

torch's own optimiser loads the compiler on first use, which takes seconds that nothing here needs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

EPSILON = 1e-8


@dataclass(frozen=True)
class Adam:
    """m ← β₁ m + (1−β₁) g,  v ← β₂ v + (1−β₂) g²,  θ ← θ − η (m/(1−β₁ⁿ)) / (√(v/(1−β₂ⁿ)) + ε) at step n.

    >>> theta, _ = Adam.start(torch.zeros(1)).step(torch.zeros(1), torch.ones(1), lr=0.5)
    >>> round(theta.item(), 6)
    -0.5
    """

    m: Tensor
    v: Tensor
    steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    @classmethod
    def start(cls, theta: Tensor, betas: tuple[float, float] = betas) -> "Adam":
        return cls(torch.zeros_like(theta), torch.zeros_like(theta), betas=betas)

    @property
    def slopes(self) -> Tensor:
        """√(v/(1−β₂ⁿ)), how large gradients were of late; one far below ε moves nothing."""
        return (self.v / (1 - self.betas[1] ** max(1, self.steps))).sqrt()

    def step(self, theta: Tensor, gradient: Tensor, lr: float | Tensor) -> tuple[Tensor, "Adam"]:
        """The next θ, and the state after it."""
        n, (beta1, beta2) = self.steps + 1, self.betas
        m = beta1 * self.m + (1 - beta1) * gradient
        v = beta2 * self.v + (1 - beta2) * gradient.square()
        unbiased_m, unbiased_v = m / (1 - beta1**n), v / (1 - beta2**n)
        return theta - lr * unbiased_m / (unbiased_v.sqrt() + EPSILON), replace(self, m=m, v=v, steps=n)
