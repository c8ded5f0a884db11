"""Server optimisers: what the server does with the clients' averaged update.

With the direction u = Σ_k Θ_k (w_k − w^(t)), the negative of Reddi et al.'s pseudo-gradient:

| name    | m                   | v                                | w^(t+1)            |
|---------|---------------------|----------------------------------|--------------------|
| plain   |                     |                                  | w + u              |
| momentum| β₁ m + u            |                                  | w + η m            |
| adam    | β₁ m + (1−β₁) u     | β₂ v + (1−β₂) u²                 | w + η m / (√v + τ) |
| yogi    | β₁ m + (1−β₁) u     | v − (1−β₂) u² sign(v − u²)       | w + η m / (√v + τ) |
| adagrad | β₁ m + (1−β₁) u     | v + u²                           | w + η m / (√v + τ) |

from m = 0 and v = τ², without bias correction. η here is the server's learning rate, not the clients'.

A step is a pure function of (w, u, state), so that a run can be walked backwards through it: `vjp` carries
dL/d(w^(t+1), new state) to dL/d(w^(t), u, state).

Reference: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2; for momentum (FedAvgM) Hsu et al.
2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedunfold.core.errors import InputError

ServerName = Literal["plain", "momentum", "adam", "yogi", "adagrad"]
ServerState = tuple[Tensor, ...]


@dataclass(frozen=True)
class ServerOptimizer:
    """A row of the table above. The state is () for plain, (m,) for momentum and (m, v) for the others."""

    name: ServerName
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in get_args(ServerName):
            raise InputError(
                f"unknown server optimiser '{self.name}'; choose one of {', '.join(get_args(ServerName))}."
            )
        if self.name == "plain" and self.lr != 1:
            raise InputError(f"plain averaging has no learning rate; leave lr at 1 instead of {self.lr}.")
        for setting, value, limit in (
            ("lr", self.lr, math.inf),
            ("tau", self.tau, math.inf),
            ("beta2", self.beta2, 1),  # 0 would let v vanish, where √v has no derivative
        ):
            if not 0 < value < limit:
                raise InputError(f"server optimiser {self.name} needs 0 < {setting} < {limit}, not {value}.")
        if not 0 <= self.beta1 < 1:
            raise InputError(f"server optimiser {self.name} needs 0 <= beta1 < 1, not {self.beta1}.")

    def initial_state(self, model: Tensor) -> ServerState:
        """The state before the first round: m = 0 and v = τ²."""
        if self.name == "plain":
            return ()
        if self.name == "momentum":
            return (torch.zeros_like(model),)
        return torch.zeros_like(model), torch.full_like(model, self.tau**2)

    def step(self, model: Tensor, direction: Tensor, state: ServerState) -> tuple[Tensor, ServerState]:
        """(w^(t), u, state) -> (w^(t+1), new state); nothing is changed in place."""
        if self.name == "plain":
            return model + direction, ()
        if self.name == "momentum":
            m = self.beta1 * state[0] + direction
            return model + self.lr * m, (m,)
        m, v = state
        m = self.beta1 * m + (1 - self.beta1) * direction
        squared = direction.square()
        if self.name == "adam":
            v = self.beta2 * v + (1 - self.beta2) * squared
        elif self.name == "yogi":
            v = v - (1 - self.beta2) * squared * torch.sign(v - squared)
        else:
            v = v + squared
        return model + self.lr * m / (v.sqrt() + self.tau), (m, v)

    def vjp(
        self,
        model: Tensor,
        direction: Tensor,
        state: ServerState,
        adjoint_model: Tensor,
        adjoint_state: ServerState,
    ) -> tuple[Tensor, Tensor, ServerState]:
        """dL/d(w^(t), u, state) from dL/d(w^(t+1), new state), for the step taken at (w^(t), u, state)."""
        if self.name == "plain":
            return adjoint_model, adjoint_model, ()
        inputs = [tensor.detach().requires_grad_() for tensor in (model, direction, *state)]
        with torch.enable_grad():
            new_model, new_state = self.step(inputs[0], inputs[1], tuple(inputs[2:]))
        to_model, to_direction, *to_state = torch.autograd.grad(
            (new_model, *new_state), inputs, (adjoint_model, *adjoint_state), materialize_grads=True
        )
        return to_model, to_direction, tuple(to_state)


def plain() -> ServerOptimizer:
    """Plain averaging: w^(t+1) = w^(t) + u, which is Σ_k Θ_k w_k.

    >>> plain().step(torch.tensor([1.0]), torch.tensor([0.5]), ())[0].tolist()
    [1.5]
    """
    return ServerOptimizer("plain")


def momentum(beta: float = 0.9, *, lr: float = 1.0) -> ServerOptimizer:
    """FedAvgM: the direction is averaged over the rounds, which smooths what absences and skew add to it."""
    return ServerOptimizer("momentum", lr, beta1=beta)


def adam(lr: float = 0.01, *, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """FedAdam: for updates whose coordinates differ in scale.

    Every coordinate moves by up to about `lr` a round (more in the first ones, while v is still near τ²),
    whatever the size of u. The default 0.01 is a middling start: try 0.001 to 0.1, the larger the fewer
    the rounds. τ bounds how much small coordinates are magnified.

    >>> server, w = adam(lr=0.1), torch.zeros(2)
    >>> w, _ = server.step(w, torch.tensor([1.0, 100.0]), server.initial_state(w))
    >>> [round(value, 3) for value in w.tolist()]
    [0.099, 0.1]
    """
    return ServerOptimizer("adam", lr, beta1, beta2, tau)


def yogi(lr: float = 0.01, *, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """FedYogi: as adam, but v changes by steps of size (1−β₂) u² only, so that it forgets a burst slowly.

    >>> yogi(lr=0.1).name
    'yogi'
    """
    return ServerOptimizer("yogi", lr, beta1, beta2, tau)


def adagrad(lr: float = 0.01, *, beta1: float = 0.9, tau: float = 1e-3) -> ServerOptimizer:
    """FedAdagrad: v only grows, so the steps shrink over the rounds; for sparse updates.

    >>> adagrad(lr=0.1).lr
    0.1
    """
    return ServerOptimizer("adagrad", lr, beta1, tau=tau)
