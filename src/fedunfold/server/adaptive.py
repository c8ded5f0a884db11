"""Adaptive server optimisers: a step size for every coordinate.

With the direction u, the negative of Reddi et al.'s pseudo-gradient, from m = 0 and v = v₀:

    m ← β₁ m + (1−β₁) u,      v by the table,      w ← w + η m / (√v + τ)

| name    | v                                |
|---------|----------------------------------|
| adam    | β₂ v + (1−β₂) u²                 |
| yogi    | v − (1−β₂) u² sign(v − u²)       |
| adagrad | v + u²                           |

The paper has v₀ = τ² or more and no bias correction, and so have these. Flower's strategies of these names begin with
v₀ = 0, which makes the first steps of small coordinates long, and its FedAdam corrects the bias, from an exponent of 2
on. At equal settings these are equal to them:

| Flower's             | this                                |
|----------------------|-------------------------------------|
| FedAdam(eta=η, …)    | adam(lr=η, …, v0=0, corrected=True) |
| FedYogi(eta=η, …)    | yogi(lr=η, …, v0=0)                 |
| FedAdagrad(eta=η, …) | adagrad(lr=η, beta1=0, …, v0=0)     |

in all that is trained; running statistics and counters, which have no gradient, are averaged here, and stepped on by
Flower's.

Reference: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
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
        v0: v₀ ≥ 0, in which v begins; None: τ².
    """

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3
    v0: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_open_interval(self, lr=math.inf, tau=math.inf)
        if not 0 <= self.beta1 < 1:
            raise InputError(f"server optimiser {self.name} needs 0 <= beta1 < 1, not {self.beta1}.")
        if self.v0 is not None and not 0 <= self.v0 < math.inf:
            raise InputError(f"server optimiser {self.name} needs a finite v0 >= 0, not {self.v0}.")

    def init(self, model: Tensor) -> State:
        return torch.zeros_like(model), torch.full_like(model, self.tau**2 if self.v0 is None else self.v0)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        m = self.beta1 * state[0] + (1 - self.beta1) * direction
        v = self.second_moment(state[1], direction.square())
        return model + self.step_size(info) * m / (self._root(v) + self.tau), (m, v)

    def step_size(self, info: RoundInfo | None) -> float:
        """η of a round."""
        return self.lr

    def _root(self, v: Tensor) -> Tensor:
        """√v; where v can be 0, with the derivative 0 there in place of an infinite one."""
        return v.sqrt() if self.v0 != 0 else torch.where(v > 0, v, 1).sqrt() * (v > 0)

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
        corrected: Whether η is corrected for the bias of m and v towards their beginning, as by Flower's FedAdam:
            η √(1 − β₂^(t+2)) / (1 − β₁^(t+2)) in round t, from 0. (Kingma and Ba's has t+1.)

    >>> server, w = Adam(lr=0.1), torch.zeros(2)
    >>> w, _ = server.update(w, torch.tensor([1.0, 100.0]), server.init(w))
    >>> [round(value, 3) for value in w.tolist()]
    [0.099, 0.1]
    """

    name: ClassVar[str] = "adam"
    beta2: float = 0.99
    corrected: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_open_interval(self, beta2=1)
        object.__setattr__(self, "corrected", bool(self.corrected))  # 1.0, from a description such as adam:corrected=1

    def step_size(self, info: RoundInfo | None) -> float:
        if not self.corrected:
            return self.lr
        if info is None:
            raise InputError(f"server optimiser {self.name} corrects by the round's number; pass its info.")
        exponent = info.round + 2
        return self.lr * math.sqrt(1 - self.beta2**exponent) / (1 - self.beta1**exponent)

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
