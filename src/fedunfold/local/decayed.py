"""Weight decay as in torch's SGD."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import State
from fedunfold.local.momentum import Momentum
from fedunfold.local.prox import Prox
from fedunfold.local.sgd import SGD
from fedunfold.local.wrapped import Wrapped, register_around


@dataclass(frozen=True)
class Decayed(Wrapped):
    """Weight decay, the gradient of λ/2 ‖w‖²:  the base steps with ∇ℓ_b(w) + λ w.

    Around sgd and momentum these are the steps of `torch.optim.SGD` with `weight_decay`. AdamW has its own.

    Attributes:
        base: sgd, prox or momentum.
        weight_decay: λ ≥ 0.

    >>> Decayed(Momentum(rho=0.5), weight_decay=0.001).name
    'decayed-momentum'
    """

    prefix: ClassVar[str] = "decayed"
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        if type(self.base) not in (SGD, Prox, Momentum):
            raise InputError(f"decayed() takes sgd, prox or momentum as its base, not {self.base.name}.")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"{self.name} needs a finite weight_decay >= 0, not {self.weight_decay}.")

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return self.base.step(params, gradient + self.weight_decay * params, state, lr, anchor)


register_around(Decayed, "sgd", "prox", "momentum")
