"""Steps corrected by how a client's gradients differ from everybody's."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.parts import LOCAL_OPTIMIZERS, State


@LOCAL_OPTIMIZERS.register("scaffold")
@dataclass(frozen=True)
class Scaffold(ControlledOptimizer):
    """SCAFFOLD in its option II:  w ← w − η (∇ℓ_b(w) − c_k + c),  and after the round, for whoever took part,

        c_k⁺ = c_k − c + (w^(t) − w_k)/(η τ_k)      c ← c + (P/K) mean_k (c_k⁺ − c_k)

    c_k is the mean gradient that client k met when it last took part, and c the plain mean of all clients' c_k, those
    included that have not taken part yet and have 0. So every client steps as if it had everybody's data, and long
    local training no longer drifts apart. For clients with unlike data that take part again and again; one that comes
    once has no c_k yet. A server sends c beside the model: twice as much goes to the clients, nothing more comes back.

    Any rule may weigh the updates, and weights can be learned: c and c_k are then constants for the adjoint. But the
    means in c stay plain, and w settles where the plain mean of the clients' gradients is 0, whatever the weights. The
    exact adjoint stores the c_k of all rounds, as much as the updates take.

    Reference: Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. Theirs are
    plain means of the updates too: the method `scaffold` weighs those who participate alike.

    >>> import torch
    >>> c, updates = torch.tensor([1.0]), torch.tensor([[-0.2], [0.4]])
    >>> Scaffold().change(c, updates, num_steps=torch.tensor([1, 2]), lr=0.1).tolist()  # −1 + 2 and −1 − 2
    [[1.0], [-3.0]]
    """

    name: ClassVar[str] = "scaffold"

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return params - lr * (gradient + state[0]), state

    def correction(self, own: Tensor, shared: Tensor) -> Tensor:
        """c − c_k."""
        return shared - own

    def change(self, shared: Tensor, updates: Tensor, num_steps: Tensor, lr: float) -> Tensor:
        """c_k⁺ − c_k = −c − Δ_k/(η τ_k)."""
        return -shared - updates / (lr * num_steps.to(updates))[:, None]
