"""A step size for every coordinate, with the length of the step left as it is."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State
from fedunfold.server.sgd import check_open_interval

TINY = 1e-12


@SERVER_OPTIMIZERS.register("grafted")
@dataclass(frozen=True)
class Grafted(ServerOptimizer):
    """v ← β₂ v + (1−β₂) u²,   r = u / (√v + c √mean(v)),   w ← w + η ‖u‖ r / ‖r‖, from v = 0.

    Coordinates on which the rounds disagree move less, as under Adam, but the whole step is as long as that of plain
    averaging. So it has no scale: nothing has to be chosen for a model or a learning rate. The larger c, the nearer
    it is to plain averaging.

    Attributes:
        lr: η > 0, the server's learning rate.
        beta2: β₂, 0 < β₂ < 1.
        damping: c > 0.

    Reference: the direction of one optimiser with the step length of another is grafting, Agarwal et al. 2020,
    Disentangling Adaptive Gradient Methods from Learning Rates.

    >>> server, w = Grafted(damping=0.5), torch.zeros(2)
    >>> step, _ = server.update(w, torch.tensor([3.0, 4.0]), server.init(w))
    >>> round(float(step.norm()), 3)
    5.0
    """

    name: ClassVar[str] = "grafted"
    lr: float = 1.0
    beta2: float = 0.99
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_open_interval(self, lr=math.inf, beta2=1, damping=math.inf)

    def init(self, model: Tensor) -> State:
        return (torch.zeros_like(model),)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        own = direction
        if info is not None:  # running statistics have scales of their own
            own = info.layout.with_buffers(direction, torch.zeros_like(info.layout.buffers(direction)))
        v = self.beta2 * state[0] + (1 - self.beta2) * own.square()
        mean = v.mean()
        tiny = torch.finfo(v.dtype).tiny
        scaled = own / ((v + TINY * mean + tiny).sqrt() + self.damping * (mean + tiny).sqrt())
        factor = own.norm() / (scaled.norm() + tiny**0.5)
        return model + self.lr * factor * scaled, (v,)
