"""Local losses with a term that moves with the rounds, so that their minima agree in the end."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, State


@LOCAL_OPTIMIZERS.register("feddyn")
@dataclass(frozen=True)
class FedDyn(ControlledOptimizer):
    """FedDyn's client, SGD on ℓ − ⟨h_k, w⟩ + α/2 ‖w − w^(t)‖²:  w ← w − η (∇ℓ_b(w) − h_k + α (w − w^(t))).

        h_k ← h_k − α Δ_k      h ← h − (α/K) Σ_k Δ_k      w^(t+1) = server(w^(t), Σ_k Θ_k Δ_k) − h/α

    for whoever took part in the round; h_k = 0 before the first time. With the plain server, w^(t) + u, and Θ_k = 1/P
    this is w^(t+1) = mean_k w_k − h/α. In the end h_k is client k's gradient where its training ends, and h their plain
    mean: everybody rests where that is 0, at the optimum of all clients together, which FedAvg with several local
    steps misses. A round that no update enters is one of the server's optimiser alone.

    For clients with unlike data that take part again and again, and train long enough to come near the minimum of
    their own loss. A larger α holds them nearer to w^(t) and makes the step −h/α smaller. Nothing is sent but the
    model.

    Any rule may weigh the updates, and weights can be learned: h_k and h, also in the step −h/α, are then constants for
    the adjoint. But the mean in h stays plain, and so does what w converges to, whatever the weights. The exact adjoint
    stores the h_k of all rounds, as much as the updates take.

    Attributes:
        alpha: α > 0.

    Reference: Acar et al. 2021, Federated Learning Based on Dynamic Regularization. Theirs is the plain mean of the
    clients that participate: the method `feddyn` weighs these alike, and leaves absent ones out (`drop`).

    >>> import torch
    >>> h, updates = torch.tensor([0.5]), torch.tensor([[-0.25], [0.5]])
    >>> FedDyn(alpha=2.0).change(h, updates, num_steps=torch.tensor([1, 3]), lr=0.1).tolist()
    [[0.5], [-1.0]]
    >>> FedDyn(alpha=2.0).corrected_model(torch.tensor([1.0]), h).tolist()
    [0.75]
    """

    name: ClassVar[str] = "feddyn"
    reads_shared: ClassVar[bool] = False
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise InputError(f"feddyn needs a finite alpha > 0, not {self.alpha}.")

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return params - lr * (gradient + state[0] + self.alpha * (params - anchor)), state

    def correction(self, own: Tensor, shared: Tensor) -> Tensor:
        """−h_k."""
        return -own

    def change(self, shared: Tensor, updates: Tensor, num_steps: Tensor, lr: float) -> Tensor:
        """−α Δ_k."""
        return -self.alpha * updates

    def corrected_model(self, model: Tensor, shared: Tensor) -> Tensor:
        """w − h/α."""
        return model - shared / self.alpha
