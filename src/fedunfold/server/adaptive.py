"""Adaptive server optimisers: a step size for every coordinate.

With the direction u, the negative of Reddi et al.'s pseudo-gradient, from m = 0 and v = τ², without bias correction:

    m ← β₁ m + (1−β₁) u,      v by the table,      w ← w + η m / (√v + τ)

| name    | v                                |
|---------|----------------------------------|
| adam    | β₂ v + (1−β₂) u²                 |
| yogi    | v − (1−β₂) u² sign(v − u²)       |
| adagrad | v + u²                           |

Reference: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State
from fedunfold.server.sgd import check_open_interval


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """What the three have in common.

    Attributes:
        lr: η > 0, the server's learning rate.
        beta1: β₁, 0 ≤ β₁ < 1.
        tau: τ > 0, which bounds how much small coordinates are magnified.
    """

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_open_interval(self, lr=math.inf, tau=math.inf)
        if not 0 <= self.beta1 < 1:
            raise InputError(f"server optimiser {self.name} needs 0 <= beta1 < 1, not {self.beta1}.")

    def init(self, model: Tensor) -> State:
        return torch.zeros_like(model), torch.full_like(model, self.tau**2)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        m = self.beta1 * state[0] + (1 - self.beta1) * direction
        v = self.second_moment(state[1], direction.square())
        return model + self.lr * m / (v.sqrt() + self.tau), (m, v)

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """The next v from u²."""


@SERVER_OPTIMIZERS.register("adam")
@dataclass(frozen=True)
class Adam(Adaptive):
    """FedAdam: for updates whose coordinates differ in scale.

    Every coordinate moves by up to about η a round (more in the first ones, while v is still near τ²), whatever the
    size of u. The default 0.01 is a middling start: try 0.001 to 0.1, the larger the fewer the rounds.

    Attributes:
        beta2: β₂, 0 < β₂ < 1; 0 would let v vanish, where √v has no derivative.

    >>> server, w = Adam(lr=0.1), torch.zeros(2)
    >>> w, _ = server.update(w, torch.tensor([1.0, 100.0]), server.init(w))
    >>> [round(value, 3) for value in w.tolist()]
    [0.099, 0.1]
    """

    name: ClassVar[str] = "adam"
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_open_interval(self, beta2=1)

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@SERVER_OPTIMIZERS.register("yogi")
@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: as adam, but v changes by steps of size (1−β₂) u² only, so that it forgets a burst slowly.

    >>> Yogi(lr=0.1).name
    'yogi'
    """

    name: ClassVar[str] = "yogi"

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


@SERVER_OPTIMIZERS.register("adagrad")
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: v only grows, so the steps shrink over the rounds; for sparse updates.

    >>> Adagrad(lr=0.1).lr
    0.1
    """

    name: ClassVar[str] = "adagrad"

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared
