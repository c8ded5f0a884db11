"""Gradients of bounded norm."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import State
from fedunfold.local.adamw import AdamW
from fedunfold.local.decayed import Decayed
from fedunfold.local.momentum import Momentum
from fedunfold.local.prox import Prox
from fedunfold.local.sgd import SGD
from fedunfold.local.wrapped import Wrapped, register_around


@dataclass(frozen=True)
class Clipped(Wrapped):
    """Clipping as by `torch.nn.utils.clip_grad_norm_`:  the base steps with g · min(1, max_norm / (‖g‖ + 10⁻⁶)).

    ‖g‖ is the norm of the gradient of all parameters together, of one minibatch of one client.

    Attributes:
        base: sgd, prox, momentum, adamw, or decayed around one of these.
        max_norm: The largest norm that a gradient keeps, > 0.

    >>> Clipped(AdamW(), max_norm=1.0).name
    'clipped-adamw'
    """

    prefix: ClassVar[str] = "clipped"
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if type(self.base) not in (SGD, Prox, Momentum, AdamW, Decayed):
            raise InputError(
                f"clipped() takes sgd, prox, momentum, adamw or decayed as its base, not {self.base.name}."
            )
        if not self.max_norm > 0:
            raise InputError(f"{self.name} needs max_norm > 0, not {self.max_norm}.")

    @property
    def uses_gradients_only(self) -> bool:
        return self.base.uses_gradients_only

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        norms = gradient.norm(dim=1, keepdim=True)
        shrunk = gradient * (self.max_norm / (norms + 1e-6)).clamp(max=1)
        return self.base.step(params, shrunk, state, lr, anchor)


register_around(
    Clipped, "sgd", "prox", "momentum", "adamw", *(f"decayed-{base}" for base in ("sgd", "prox", "momentum"))
)
